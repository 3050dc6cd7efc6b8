#include "prefix_tree.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

namespace metal_prefill {

namespace {

constexpr TokenId kNone = -1;

// The tokens of a page that begins at `first`.
std::array<TokenId, kPagePositions> page_tokens(std::span<const TokenId> tokens, std::size_t first) {
  std::array<TokenId, kPagePositions> page;
  page.fill(kNone);
  std::copy_n(tokens.begin() + std::ptrdiff_t(first), std::min(page.size(), tokens.size() - first),
              page.begin());
  return page;
}

// The last of some states at or before a position; null if there is none.
const StatePoint* last_state(std::span<const StatePoint> states, int position) {
  const auto after = std::upper_bound(states.begin(), states.end(), position,
                                      [](int at, const StatePoint& state) { return at < state.position; });
  return after == states.begin() ? nullptr : &*std::prev(after);
}

}  // namespace

PrefixTree::PrefixTree(PagePool& pool, std::size_t max_pages, const StatePool* states)
    : pool_(pool), max_pages_(max_pages), states_(states) {}

PrefixTree::~PrefixTree() {
  // Leaves first: recursive destruction of a root would be as deep as a prompt is long.
  while (oldest_) remove(*oldest_);
}

PrefixTree::Step PrefixTree::longest(Children& children, const PageTokens& wanted) {
  Step best;
  const auto consider = [&](Children::iterator child) {
    int positions = common_prefix(wanted, child->first);
    while (positions > 0 && wanted[std::size_t(positions) - 1] == kNone) --positions;  // padding agrees too
    if (positions > best.positions) best = {child->second.get(), positions};
  };
  // In lexicographic order, nothing agrees longer than one of the two neighbours.
  const auto after = children.lower_bound(wanted);
  if (after != children.end()) consider(after);
  if (after != children.begin()) consider(std::prev(after));
  return best;
}

template <typename Visit>
int PrefixTree::walk(std::string_view name_space, std::span<const TokenId> tokens, Visit visit) {
  const auto root = roots_.find(name_space);
  if (root == roots_.end()) return 0;
  Node* at = &root->second;
  int known = 0;
  while (std::size_t(known) < tokens.size()) {
    const Step step = longest(at->children, page_tokens(tokens, std::size_t(known)));
    if (!step.node) break;
    known += step.positions;
    visit(*step.node, known);
    if (step.positions < kPagePositions) break;
    at = step.node;
  }
  return known;
}

PrefixTree::Match PrefixTree::find(std::string_view name_space, std::span<const TokenId> tokens) {
  const std::scoped_lock lock(mutex_);
  Match match;
  Node* last = nullptr;
  match.positions = walk(name_space, tokens, [&](Node& node, int known) {
    match.pages.push_back(node.page);
    if (const StatePoint* state = last_state(node.states, known)) match.state = *state;
    last = &node;
  });
  touch(last);
  pool_.retain(match.pages);
  return match;
}

PrefixTree::Known PrefixTree::known(std::string_view name_space, std::span<const TokenId> tokens) {
  const std::scoped_lock lock(mutex_);
  Known found;
  found.positions = walk(name_space, tokens, [&](const Node& node, int known) {
    if (const StatePoint* state = last_state(node.states, known)) found.usable = state->position;
  });
  if (!states_) found.usable = found.positions;
  return found;
}

bool PrefixTree::insert(std::string_view name_space, std::span<const TokenId> tokens,
                        std::span<const PageId> pages, std::span<const StatePoint> states) noexcept {
  const std::scoped_lock lock(mutex_);
  Node *root = nullptr, *last = nullptr;
  bool complete = true;
  try {
    auto place = roots_.find(name_space);
    if (place == roots_.end()) place = roots_.try_emplace(std::string(name_space)).first;
    root = last = &place->second;
    root->name_space = &place->first;
    remember(last, tokens, pages, states);
  } catch (const std::bad_alloc&) {
    complete = false;
  }
  touch(last);
  if (root) drop_if_empty(*root);
  while (bytes_held() > max_pages_ * pool_.page_bytes() && drop_oldest(false)) {
  }
  return complete;
}

// Descends from a root, `at`, and adds missing nodes; `at` is then the last node.
void PrefixTree::remember(Node*& at, std::span<const TokenId> tokens, std::span<const PageId> pages,
                          std::span<const StatePoint> states) {
  for (std::size_t i = 0; i * kPagePositions < tokens.size(); ++i) {
    const PageTokens own = page_tokens(tokens, i * kPagePositions);
    const std::size_t n = std::min(tokens.size() - i * kPagePositions, std::size_t(kPagePositions));
    const int begin = int(i) * kPagePositions, end = begin + int(n);  // positions of the page
    const Step known = longest(at->children, own);
    if (known.positions == int(n)) {  // with these tokens, or with more after them
      at = known.node;
      add_states(*at, begin, end, states);
      if (n < kPagePositions) return;
      continue;
    }
    const auto place = at->children.try_emplace(own, std::make_unique<Node>()).first;
    Node& node = *place->second;
    node.parent = at;
    node.place = place;
    node.page = pages[i];
    link(node);
    pool_.retain({&pages[i], 1});
    ++count_;
    at = &node;
    add_states(node, begin, end, states);
    // Replaces a page with fewer of the same tokens. There is at most one, and it is next to the new one: any
    // page in between would start with its tokens, and would have replaced it.
    if (place == node.parent->children.begin()) continue;
    ++examined_;
    const auto before = std::prev(place);
    const PageTokens& other = before->first;
    const auto padding = std::find(other.begin(), other.end(), kNone);
    if (padding != other.end() && std::equal(other.begin(), padding, own.begin())) {
      add_states(node, begin, int(tokens.size()), before->second->states);
      remove(*before->second);
    }
  }
}

// Adds those at positions after `begin` up to `end`.
void PrefixTree::add_states(Node& node, int begin, int end, std::span<const StatePoint> states) {
  const auto by_position = [](const StatePoint& a, const StatePoint& b) { return a.position < b.position; };
  for (const StatePoint& state : states) {
    if (state.position <= begin || state.position > end) continue;
    const auto place = std::lower_bound(node.states.begin(), node.states.end(), state, by_position);
    if (place != node.states.end() && place->position == state.position) continue;
    node.states.insert(place, state);
    ++count_states_;
    if (node.states.size() <= kMostStates) continue;
    node.states.erase(node.states.begin());
    --count_states_;
  }
}

std::size_t PrefixTree::bytes_held() const {
  return count_ * pool_.page_bytes() + (states_ ? count_states_ * states_->slot_bytes() : 0);
}

bool PrefixTree::evict() {
  const std::scoped_lock lock(mutex_);
  return drop_oldest(true);
}

bool PrefixTree::forget(PageId page) {
  const std::scoped_lock lock(mutex_);
  // A page that is about to be written to was used recently.
  for (Node* node = newest_; node; node = node->older) {
    if (node->page != page || !node->children.empty()) continue;
    remove(*node);
    return true;
  }
  return false;
}

// Removes a leaf: earlier pages are useful without it, but not the reverse. If `unused_only` and sessions
// hold all leaves, removes a page that only the tree holds, with all after it.
bool PrefixTree::drop_oldest(bool unused_only) {
  const Node* first_held = nullptr;
  while (oldest_ && oldest_ != first_held) {
    ++examined_;
    if (!unused_only || !pool_.is_shared(oldest_->page)) {
      remove(*oldest_);
      return true;
    }
    // Later calls do not examine it again before all others.
    if (!first_held) first_held = oldest_;
    touch(oldest_);
  }
  // Sessions may hold every leaf without the pages before it: if a session computes a page that the tree
  // already has, its next pages are inserted after that of the tree.
  for (Node* node = oldest_; node; node = node->newer) {
    ++examined_;
    if (pool_.is_shared(node->page)) continue;
    remove_with_descendants(*node);
    return true;
  }
  return false;
}

void PrefixTree::remove_with_descendants(Node& node) {
  Node* at = &node;
  for (bool last = false; !last;) {
    while (!at->children.empty()) at = at->children.begin()->second.get();
    last = at == &node;
    remove(*std::exchange(at, at->parent));
  }
}

void PrefixTree::remove(Node& leaf) {
  pool_.release({&leaf.page, 1});
  unlink(leaf);
  --count_;
  count_states_ -= leaf.states.size();
  Node& parent = *leaf.parent;
  parent.children.erase(leaf.place);
  drop_if_empty(parent);
}

// Keeps no namespace that has no pages.
void PrefixTree::drop_if_empty(const Node& root) {
  if (root.name_space && root.children.empty()) roots_.erase(roots_.find(*root.name_space));
}

// Makes a node and its ancestors the most recently used, each more recent than its descendants.
void PrefixTree::touch(Node* node) {
  for (; node && node->parent; node = node->parent) {
    unlink(*node);
    link(*node);
  }
}

void PrefixTree::link(Node& node) {
  node.older = newest_;
  (newest_ ? newest_->newer : oldest_) = &node;
  newest_ = &node;
}

void PrefixTree::unlink(Node& node) {
  (node.older ? node.older->newer : oldest_) = node.newer;
  (node.newer ? node.newer->older : newest_) = node.older;
  node.older = node.newer = nullptr;
}

std::size_t PrefixTree::pages() const {
  const std::scoped_lock lock(mutex_);
  return count_;
}

std::size_t PrefixTree::bytes() const {
  const std::scoped_lock lock(mutex_);
  return bytes_held();
}

std::size_t PrefixTree::namespaces() const {
  const std::scoped_lock lock(mutex_);
  return roots_.size();
}

std::uint64_t PrefixTree::examined() const {
  const std::scoped_lock lock(mutex_);
  return examined_;
}

}  // namespace metal_prefill
