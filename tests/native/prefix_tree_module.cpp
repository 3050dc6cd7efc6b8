#include "prefix_tree_module.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cache/pages.h"
#include "cache/prefix_tree.h"
#include "cache/states.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill {
namespace {

using Tokens = std::vector<TokenId>;

constexpr std::size_t kPageBytes = std::size_t(1) << 20;

// Accounts for blocks without memory.
class NoStore final : public PageStore {
 public:
  explicit NoStore(std::size_t bytes) : bytes_(bytes) {}
  std::size_t page_bytes() const override { return bytes_; }
  void grow(std::size_t) override {}
  void copy(PageId, PageId, int) override {}

 private:
  const std::size_t bytes_;
};

class Tree {
 public:
  // A state takes the memory of `state_pages`, and sessions keep states at intervals of as many pages; 0: no
  // states.
  Tree(std::size_t max_pages, std::size_t pool_pages, std::size_t state_pages)
      : state_store_(std::max(state_pages, std::size_t(1)) * kPageBytes),
        pool_(store_, pool_pages * kPageBytes),
        states_(state_store_, pool_pages * state_store_.page_bytes(), kPageBytes, nullptr),
        tree_(pool_, max_pages, state_pages > 0 ? &states_ : nullptr) {}

  // Inserts like a session that computed these tokens, kept the states at these positions, and ended.
  bool insert(const std::string& name_space, const Tokens& tokens, const std::vector<int>& positions) {
    tree_.count_prompt();
    const std::vector<PageId> pages = pool_.take(pages_of(int(tokens.size())));
    std::vector<StatePoint> points;
    for (const int position : positions) points.push_back({position, states_.take()});
    const bool inserted = tree_.insert(name_space, tokens, pages, points);
    pool_.release(pages);
    return inserted;
  }
  // Finds like a session that uses a prefix of these tokens, and holds its pages until they are released and
  // the state until it is deleted.
  nb::tuple find(const std::string& name_space, const Tokens& tokens) {
    tree_.count_prompt();
    PrefixTree::Match match = tree_.find(name_space, tokens);
    return nb::make_tuple(match.positions, std::move(match.pages), std::move(match.state));
  }
  void release(const std::vector<PageId>& pages) { pool_.release(pages); }

  PrefixTree& tree() { return tree_; }
  const PagePool& pool() const { return pool_; }
  std::size_t states_in_use() const { return states_.bytes_in_use() / states_.slot_bytes(); }

 private:
  NoStore store_{kPageBytes}, state_store_;
  PagePool pool_;
  StatePool states_;
  PrefixTree tree_;
};

}  // namespace

void bind_prefix_tree(nb::module_& m) {
  nb::class_<StatePoint>(m, "StatePoint").def_ro("position", &StatePoint::position);
  nb::class_<Tree>(m, "PrefixTree", "A prefix tree over pages without contents.")
      .def(nb::init<std::size_t, std::size_t, std::size_t>(), "max_pages"_a, "pool_pages"_a,
           "state_pages"_a = 0)
      .def("insert", &Tree::insert, "namespace"_a, "tokens"_a, "states"_a = std::vector<int>())
      .def("find", &Tree::find, "namespace"_a, "tokens"_a,
           "Return positions, pages to release, and the last state.")
      .def("release", &Tree::release, "pages"_a)
      .def(
          "known",
          [](Tree& self, const std::string& name_space, const Tokens& tokens) {
            return self.tree().known(name_space, tokens).positions;
          },
          "namespace"_a, "tokens"_a)
      .def(
          "usable",
          [](Tree& self, const std::string& name_space, const Tokens& tokens) {
            return self.tree().known(name_space, tokens).usable;
          },
          "namespace"_a, "tokens"_a, "Return the position of the last state within the known tokens.")
      .def("evict", [](Tree& self) { return self.tree().evict(); })
      .def_prop_ro("pages", [](Tree& self) { return self.tree().pages(); })
      .def_prop_ro("pages_in_use", [](const Tree& self) { return self.pool().pages_in_use(); })
      .def_prop_ro("states_in_use", &Tree::states_in_use)
      .def_prop_ro("namespaces", [](Tree& self) { return self.tree().namespaces(); })
      .def_prop_ro("examined", [](Tree& self) { return self.tree().examined(); });
}

}  // namespace metal_prefill
