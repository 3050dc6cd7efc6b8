// Lookup of pages by their tokens.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/token.h"
#include "pages.h"
#include "states.h"

namespace metal_prefill {

// A radix tree over token ids for each namespace, with a page for each node: the tokens of a node are those
// of its page, and the path to it holds the tokens before them. The tree holds its pages as a session does,
// so that they outlive the sessions that computed them. A prefix is found only in the namespace that it was
// inserted in. A node also holds states of recurrent layers within its page, in models that have them; only a
// prefix that ends at a state is usable in such models. Safe to call from several threads.
class PrefixTree {
 public:
  // Keeps at most the memory of `max_pages` pages over all namespaces. The least recently used are evicted
  // first. If their next use is expected before that of the prompt that needs the room, its own last pages
  // are evicted instead. `states` is null for a model without recurrent layers.
  PrefixTree(PagePool& pool, std::size_t max_pages, const StatePool* states = nullptr);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // The longest prefix of `tokens` that the namespace holds. The last page may match partly.
  struct Match {
    std::vector<PageId> pages;  // held for the caller, who releases them
    int positions = 0;
    StatePoint state;  // the last state within `positions`
  };
  Match find(std::string_view name_space, std::span<const TokenId> tokens);
  // Counts a prompt, with or without a match. Intervals between uses are numbers of prompts.
  void count_prompt();
  // Number of positions that `find` would return, and how many are usable. Does not count as a use.
  struct Known {
    int positions = 0;
    int usable = 0;  // up to the last state; all without recurrent layers
  };
  Known known(std::string_view name_space, std::span<const TokenId> tokens);
  // Adds the pages of these tokens; the last page may be partly filled. A session that writes to one of them
  // afterwards writes to a copy. Returns false if memory ran out before all were added. `states` are of
  // positions within the tokens, in ascending order.
  [[nodiscard]] bool insert(std::string_view name_space, std::span<const TokenId> tokens,
                            std::span<const PageId> pages, std::span<const StatePoint> states = {}) noexcept;
  // Releases the least recently used page or state that only the tree holds, preferably a page without
  // successors in the tree; the successors of other pages are no longer found. Returns false if there is
  // none. Pages and states that a session holds count as just used.
  bool evict();
  // Releases a page without successors; returns false if there is no such page.
  bool forget(PageId page);

  std::size_t pages() const;
  std::size_t bytes() const;  // of pages and states
  std::size_t namespaces() const;
  // Number of nodes and states examined so far to make room or to replace others.
  std::uint64_t examined() const;

 private:
  // Token ids of a page, padded with -1.
  using PageTokens = std::array<TokenId, kPagePositions>;
  struct Node;
  using Children = std::map<PageTokens, std::unique_ptr<Node>>;
  // Entries are evicted in order of last use. States at intervals of the pool are not in that order: they are
  // as useful as their pages. Of the states at ends of a conversation's prompts, only the latest is useful.
  struct Entry {
    explicit Entry(bool is_node) : is_node(is_node) {}
    const bool is_node;
    Entry *older = nullptr, *newer = nullptr;
  };
  // Nodes whose pages share a prefix also share the points within it.
  struct State : Entry {
    State(Node& of, std::shared_ptr<const StatePoint> at) : Entry(false), node(of), point(std::move(at)) {}
    Node& node;
    const std::shared_ptr<const StatePoint> point;
  };
  struct Node : Entry {
    Node() : Entry(true) {}
    Node* parent = nullptr;
    Children::iterator place;  // position in parent->children
    PageId page = 0;
    std::uint64_t used = 0;  // value of prompts_ at its last use
    // Prompts between its last two uses; the parent's interval if no prompt has found it. 0: unknown.
    std::uint64_t interval = 0;
    std::vector<std::unique_ptr<State>> states;  // within the page, in ascending order of positions
    Children children;
    const std::string* name_space = nullptr;  // set in roots, which have no page and no parent
  };
  struct Step {
    Node* node = nullptr;  // the child with the longest common prefix
    int positions = 0;     // length of that prefix
  };
  static Step longest(Children& children, const PageTokens& wanted);
  static State* last_state(const Node& node, int position);
  template <typename Visit>
  int walk(std::string_view name_space, std::span<const TokenId> tokens, Visit visit);
  void remember(Node*& at, std::span<const TokenId> tokens, std::span<const PageId> pages,
                std::span<const StatePoint> states);
  void add_states(Node& node, int begin, int end, std::span<const StatePoint> states);
  void share_states(Node& node, const Node& from, int end);
  State& add(Node& node, std::shared_ptr<const StatePoint> point);
  bool has_order(const State& state) const { return state.point->position % states_->interval() != 0; }
  bool is_shared(const Entry& entry) const;
  std::size_t bytes_held() const;
  void drop_if_empty(const Node& root);
  void link(Entry& entry);
  void unlink(Entry& entry);
  void touch(Entry& entry);
  bool is_due_before(const Entry& other, const Node& node) const;
  void remove(Entry& entry);
  void remove_with_descendants(Node& node);

  PagePool& pool_;
  const std::size_t max_pages_;
  const StatePool* const states_;
  mutable std::mutex mutex_;
  std::map<std::string, Node, std::less<>> roots_;  // by namespace; each has children
  // Ends of the order of use. A node is always older than its parent, so the oldest node is a leaf.
  Entry *oldest_ = nullptr, *newest_ = nullptr;
  std::size_t count_ = 0, count_states_ = 0;
  std::uint64_t prompts_ = 0, examined_ = 0;
  const ForkHandler fork_handler_{[this] { mutex_.lock(); }, [this](bool) { mutex_.unlock(); }};
};

}  // namespace metal_prefill
