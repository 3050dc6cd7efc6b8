#include "prefix_tree.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

namespace metal_prefill {

namespace {

constexpr TokenId kNone = -1;

// The tokens of the page that begins at `first`, padded with kNone.
std::array<TokenId, kPagePositions> page_tokens(std::span<const TokenId> tokens, std::size_t first) {
  std::array<TokenId, kPagePositions> page;
  page.fill(kNone);
  std::copy_n(tokens.begin() + std::ptrdiff_t(first), std::min(page.size(), tokens.size() - first),
              page.begin());
  return page;
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
    while (positions > 0 && wanted[std::size_t(positions) - 1] == kNone) --positions;  // padding
    if (positions > best.positions) best = {child->second.get(), positions};
  };
  // In lexicographic order, one of the two neighbours has the longest common prefix.
  const auto after = children.lower_bound(wanted);
  if (after != children.end()) consider(after);
  if (after != children.begin()) consider(std::prev(after));
  return best;
}

// The last state of a node at or before a position; null if there is none.
PrefixTree::State* PrefixTree::last_state(const Node& node, int position) {
  State* last = nullptr;
  for (const auto& state : node.states)
    if (state->point->position <= position) last = state.get();
  return last;
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
  State* state = nullptr;
  match.positions = walk(name_space, tokens, [&](Node& node, int known) {
    match.pages.push_back(node.page);
    if (node.used != prompts_) node.interval = prompts_ - node.used;
    if (State* of_page = last_state(node, known)) state = of_page;
    last = &node;
  });
  if (last) touch(*last);
  if (state) {
    touch(*state);
    match.state = *state->point;
  }
  pool_.retain(match.pages);
  return match;
}

void PrefixTree::count_prompt() {
  const std::scoped_lock lock(mutex_);
  ++prompts_;
}

PrefixTree::Known PrefixTree::known(std::string_view name_space, std::span<const TokenId> tokens) {
  const std::scoped_lock lock(mutex_);
  Known found;
  found.positions = walk(name_space, tokens, [&](const Node& node, int known) {
    if (const State* state = last_state(node, known)) found.usable = state->point->position;
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
  if (root) {
    touch(*last);
    if (last == root) last = nullptr;
    drop_if_empty(*root);
  }
  while (oldest_ && bytes_held() > max_pages_ * pool_.page_bytes()) {
    ++examined_;
    // Keeps the first page of a prompt, whose interval between uses later prompts read.
    const bool may_shorten = last && last->parent->parent && last->children.empty();
    Entry& evicted = may_shorten && is_due_before(*oldest_, *last) ? *last : *oldest_;
    if (&evicted == last) last = may_shorten ? last->parent : nullptr;
    remove(evicted);
  }
  return complete;
}

// Whether the next use of `other` is due, is not overdue, and precedes that of `node`, which was just used.
bool PrefixTree::is_due_before(const Entry& other, const Node& node) const {
  if (!other.is_node) return false;
  const Node& page = static_cast<const Node&>(other);
  const std::uint64_t due = page.used + page.interval;
  return prompts_ < due && due <= prompts_ + node.interval;
}

// Descends from the root `at` and adds missing nodes. On return, `at` is the last node.
void PrefixTree::remember(Node*& at, std::span<const TokenId> tokens, std::span<const PageId> pages,
                          std::span<const StatePoint> states) {
  for (std::size_t i = 0; i * kPagePositions < tokens.size(); ++i) {
    const PageTokens own = page_tokens(tokens, i * kPagePositions);
    const std::size_t n = std::min(tokens.size() - i * kPagePositions, std::size_t(kPagePositions));
    const int begin = int(i) * kPagePositions, end = begin + int(n);  // positions of the page
    const Step known = longest(at->children, own);
    if (known.positions == int(n)) {  // the page has these tokens, perhaps with more after them
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
    node.interval = at->interval;
    link(node);
    pool_.retain({&pages[i], 1});
    ++count_;
    at = &node;
    if (known.node) share_states(node, *known.node, begin + known.positions);
    // Replaces a page that has fewer of the same tokens. There is at most one, directly before the new one: a
    // page in between would start with the same tokens and would have replaced it.
    if (place != node.parent->children.begin()) {
      ++examined_;
      const auto before = std::prev(place);
      const PageTokens& other = before->first;
      const auto padding = std::find(other.begin(), other.end(), kNone);
      if (padding != other.end() && std::equal(other.begin(), padding, own.begin())) {
        share_states(node, *before->second, end);
        remove(*before->second);
      }
    }
    add_states(node, begin, end, states);
  }
}

// Adds the states at positions in (begin, end].
void PrefixTree::add_states(Node& node, int begin, int end, std::span<const StatePoint> states) {
  for (const StatePoint& point : states) {
    if (point.position <= begin || point.position > end) continue;
    State* state = last_state(node, point.position);
    if (!state || state->point->position < point.position)
      state = &add(node, std::make_shared<StatePoint>(point));
    touch(*state);
  }
}

// Adds the states of another node up to `end`, the end of the tokens that both nodes have in common.
void PrefixTree::share_states(Node& node, const Node& from, int end) {
  for (const auto& state : from.states) {
    const int position = state->point->position;
    const State* own = last_state(node, position);
    if (position <= end && !(own && own->point->position == position)) add(node, state->point);
  }
}

PrefixTree::State& PrefixTree::add(Node& node, std::shared_ptr<const StatePoint> point) {
  const auto after = std::find_if(
      node.states.begin(), node.states.end(),
      [position = point->position](const auto& other) { return other->point->position > position; });
  const bool is_new = point.use_count() == 1;
  State& added = **node.states.insert(after, std::make_unique<State>(node, std::move(point)));
  if (has_order(added)) link(added);
  count_states_ += is_new;
  return added;
}

std::size_t PrefixTree::bytes_held() const {
  return count_ * pool_.page_bytes() + (states_ ? count_states_ * states_->slot_bytes() : 0);
}

bool PrefixTree::forget(PageId page) {
  const std::scoped_lock lock(mutex_);
  // Starts at the newest entry: a page that is about to be written to was used recently.
  for (Entry* entry = newest_; entry; entry = entry->older) {
    if (!entry->is_node) continue;
    Node& node = static_cast<Node&>(*entry);
    if (node.page != page || !node.children.empty()) continue;
    remove(node);
    return true;
  }
  return false;
}

bool PrefixTree::is_shared(const Entry& entry) const {
  return entry.is_node ? pool_.is_shared(static_cast<const Node&>(entry).page)
                       : states_->is_shared(static_cast<const State&>(entry).point->state);
}

bool PrefixTree::evict() {
  const std::scoped_lock lock(mutex_);
  // First tries states and leaves: earlier pages are useful without them, but not the reverse.
  const Entry* first_held = nullptr;
  while (oldest_ && oldest_ != first_held) {
    ++examined_;
    if (!is_shared(*oldest_)) {
      remove(*oldest_);
      return true;
    }
    // Makes it the newest entry, so that later calls examine all others first.
    if (!first_held) first_held = oldest_;
    touch(*oldest_);
  }
  // Otherwise evicts a page with all its successors, or a state at an interval. Sessions may hold every leaf
  // but not the pages before it: if a session computes a page that the tree already has, its next pages are
  // inserted after the tree's page.
  for (Entry* entry = oldest_; entry; entry = entry->newer) {
    ++examined_;
    if (!entry->is_node) continue;
    Node& node = static_cast<Node&>(*entry);
    if (!is_shared(node)) {
      remove_with_descendants(node);
      return true;
    }
    const auto unused = std::find_if(node.states.begin(), node.states.end(),
                                     [&](const auto& state) { return !is_shared(*state); });
    if (unused == node.states.end()) continue;
    remove(**unused);
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

void PrefixTree::remove(Entry& entry) {
  if (!entry.is_node) {
    State& state = static_cast<State&>(entry);
    if (has_order(state)) unlink(state);
    count_states_ -= state.point.use_count() == 1;
    std::erase_if(state.node.states, [gone = &state](const auto& other) { return other.get() == gone; });
    return;
  }
  Node& leaf = static_cast<Node&>(entry);
  while (!leaf.states.empty()) remove(*leaf.states.back());
  pool_.release({&leaf.page, 1});
  unlink(leaf);
  --count_;
  Node& parent = *leaf.parent;
  parent.children.erase(leaf.place);
  drop_if_empty(parent);
}

// Removes a namespace without pages.
void PrefixTree::drop_if_empty(const Node& root) {
  if (root.name_space && root.children.empty()) roots_.erase(roots_.find(*root.name_space));
}

// Makes a state, or a node and its ancestors, the most recently used. A node becomes more recent than its
// descendants.
void PrefixTree::touch(Entry& entry) {
  const auto renew = [this](Entry& used) {
    unlink(used);
    link(used);
  };
  if (!entry.is_node) {
    if (has_order(static_cast<State&>(entry))) renew(entry);
    return;
  }
  for (Node* node = &static_cast<Node&>(entry); node->parent; node = node->parent) {
    node->used = prompts_;
    renew(*node);
  }
}

void PrefixTree::link(Entry& entry) {
  entry.older = newest_;
  (newest_ ? newest_->newer : oldest_) = &entry;
  newest_ = &entry;
}

void PrefixTree::unlink(Entry& entry) {
  (entry.older ? entry.older->newer : oldest_) = entry.newer;
  (entry.newer ? entry.newer->older : newest_) = entry.older;
  entry.older = entry.newer = nullptr;
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
