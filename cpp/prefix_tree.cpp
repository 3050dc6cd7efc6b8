#include "prefix_tree.h"

#include <algorithm>
#include <iterator>
#include <new>

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

}  // namespace

PrefixTree::PrefixTree(PagePool& pool, std::size_t max_pages) : pool_(pool), max_pages_(max_pages) {}

PrefixTree::~PrefixTree() {
  while (!root_.children.empty()) {
    Children* at = &root_.children;
    while (!at->begin()->second->children.empty()) at = &at->begin()->second->children;
    pool_.release({&at->begin()->second->page, 1});
    at->erase(at->begin());
  }
}

PrefixTree::Step PrefixTree::longest(Children& children, const PageTokens& wanted) {
  Step best;
  const auto consider = [&](Children::iterator child) {
    const auto differs = std::mismatch(wanted.begin(), wanted.end(), child->first.begin()).first;
    int positions = int(differs - wanted.begin());
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
int PrefixTree::walk(std::span<const TokenId> tokens, Visit visit) {
  Node* at = &root_;
  int known = 0;
  while (std::size_t(known) < tokens.size()) {
    const Step step = longest(at->children, page_tokens(tokens, std::size_t(known)));
    if (!step.node) break;
    visit(*step.node);
    known += step.positions;
    if (step.positions < kPagePositions) break;
    at = step.node;
  }
  return known;
}

PrefixTree::Match PrefixTree::find(std::span<const TokenId> tokens) {
  const std::scoped_lock lock(mutex_);
  ++clock_;
  Match match;
  match.positions = walk(tokens, [&](Node& node) {
    node.used = clock_;
    match.pages.push_back(node.page);
  });
  pool_.retain(match.pages);
  return match;
}

int PrefixTree::known(std::span<const TokenId> tokens) {
  const std::scoped_lock lock(mutex_);
  return walk(tokens, [](Node&) {});
}

bool PrefixTree::insert(std::span<const TokenId> tokens, std::span<const PageId> pages) noexcept {
  const std::scoped_lock lock(mutex_);
  try {
    remember(tokens, pages);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void PrefixTree::remember(std::span<const TokenId> tokens, std::span<const PageId> pages) {
  ++clock_;
  Node* at = &root_;
  for (std::size_t i = 0; i * kPagePositions < tokens.size(); ++i) {
    const PageTokens own = page_tokens(tokens, i * kPagePositions);
    const std::size_t n = std::min(tokens.size() - i * kPagePositions, std::size_t(kPagePositions));
    const Step known = longest(at->children, own);
    if (known.positions == int(n)) {  // with these tokens, or with more after them
      known.node->used = clock_;
      at = known.node;
      if (n < kPagePositions) return;
      continue;
    }
    // A page that holds less of the same has served its time.
    for (auto child = at->children.begin(); child != at->children.end();) {
      const PageTokens& other = child->first;
      const auto end = std::find(other.begin(), other.end(), kNone);
      if (end != other.end() && std::equal(other.begin(), end, own.begin())) {
        pool_.release({&child->second->page, 1});
        child = at->children.erase(child);
        --count_;
      } else {
        ++child;
      }
    }
    auto node = std::make_unique<Node>();
    node->page = pages[i];
    node->used = clock_;
    at = (at->children[own] = std::move(node)).get();
    pool_.retain({&pages[i], 1});
    ++count_;
  }
  while (count_ > max_pages_ && drop_oldest(false)) {
  }
}

bool PrefixTree::evict() {
  const std::scoped_lock lock(mutex_);
  return drop_oldest(true);
}

// Drops a leaf: the pages before it are of use without it, it is of none without them.
bool PrefixTree::drop_oldest(bool unused_only) {
  Children* parent = nullptr;
  Children::iterator oldest;
  std::vector<Node*> stack = {&root_};
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    for (auto child = node->children.begin(); child != node->children.end(); ++child) {
      const Node& candidate = *child->second;
      if (!candidate.children.empty()) {
        stack.push_back(child->second.get());
      } else if ((!parent || candidate.used < oldest->second->used) &&
                 !(unused_only && pool_.is_shared(candidate.page))) {
        parent = &node->children;
        oldest = child;
      }
    }
  }
  if (!parent) return false;
  pool_.release({&oldest->second->page, 1});
  parent->erase(oldest);
  --count_;
  return true;
}

std::size_t PrefixTree::pages() const {
  const std::scoped_lock lock(mutex_);
  return count_;
}

}  // namespace metal_prefill
