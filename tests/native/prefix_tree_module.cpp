#include "prefix_tree_module.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "cache/pages.h"
#include "cache/prefix_tree.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill {
namespace {

using Tokens = std::vector<TokenId>;

class NoStore final : public PageStore {
 public:
  std::size_t page_bytes() const override { return std::size_t(1) << 20; }
  void grow(std::size_t) override {}
  void copy(PageId, PageId, int) override {}
};

class Tree {
 public:
  Tree(std::size_t max_pages, std::size_t pool_pages)
      : pool_(store_, pool_pages * store_.page_bytes()), tree_(pool_, max_pages) {}

  // As a session that computed these tokens and ended.
  bool insert(const std::string& name_space, const Tokens& tokens) {
    const std::vector<PageId> pages = pool_.take(pages_of(int(tokens.size())));
    const bool inserted = tree_.insert(name_space, tokens, pages);
    pool_.release(pages);
    return inserted;
  }
  // As a session that found a prefix of these tokens and holds its pages until they are released.
  std::pair<int, std::vector<PageId>> find(const std::string& name_space, const Tokens& tokens) {
    PrefixTree::Match match = tree_.find(name_space, tokens);
    return {match.positions, std::move(match.pages)};
  }
  void release(const std::vector<PageId>& pages) { pool_.release(pages); }

  PrefixTree& tree() { return tree_; }
  const PagePool& pool() const { return pool_; }

 private:
  NoStore store_;
  PagePool pool_;
  PrefixTree tree_;
};

}  // namespace

void bind_prefix_tree(nb::module_& m) {
  nb::class_<Tree>(m, "PrefixTree", "A prefix tree over pages without contents.")
      .def(nb::init<std::size_t, std::size_t>(), "max_pages"_a, "pool_pages"_a)
      .def("insert", &Tree::insert, "namespace"_a, "tokens"_a)
      .def("find", &Tree::find, "namespace"_a, "tokens"_a, "Return positions, and pages to release.")
      .def("release", &Tree::release, "pages"_a)
      .def(
          "known",
          [](Tree& self, const std::string& name_space, const Tokens& tokens) {
            return self.tree().known(name_space, tokens).positions;
          },
          "namespace"_a, "tokens"_a)
      .def("evict", [](Tree& self) { return self.tree().evict(); })
      .def_prop_ro("pages", [](Tree& self) { return self.tree().pages(); })
      .def_prop_ro("pages_in_use", [](const Tree& self) { return self.pool().pages_in_use(); })
      .def_prop_ro("namespaces", [](Tree& self) { return self.tree().namespaces(); })
      .def_prop_ro("examined", [](Tree& self) { return self.tree().examined(); });
}

}  // namespace metal_prefill
