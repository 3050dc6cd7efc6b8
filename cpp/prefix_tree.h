// Pages that are found again by what they hold.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "pages.h"
#include "token.h"

namespace metal_prefill {

// A radix tree over token ids, a page for each node: its tokens are those of the page, and the path to it
// those before. The tree holds its pages as a session does, so that they outlive the sessions that computed
// them. Safe to call from several threads.
class PrefixTree {
 public:
  // Keeps at most `max_pages`; those that were not used for longest leave first.
  PrefixTree(PagePool& pool, std::size_t max_pages);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // The longest beginning of `tokens` that the tree knows. The last page may be known in part.
  struct Match {
    std::vector<PageId> pages;  // held for the caller, who releases them
    int positions = 0;
  };
  Match find(std::span<const TokenId> tokens);
  // How far `find` would get.
  int known(std::span<const TokenId> tokens);
  // Remembers the pages of these tokens, the last one though it may be full in part. Whoever writes to a
  // page of them from now on writes to a copy. False where there was no memory to note all of them.
  [[nodiscard]] bool insert(std::span<const TokenId> tokens, std::span<const PageId> pages) noexcept;
  // Lets go of the page that nobody else holds and that was not used for longest. False: there is none.
  bool evict();

  std::size_t pages() const;

 private:
  // Padded with -1 where a page is full in part.
  using PageTokens = std::array<TokenId, kPagePositions>;
  struct Node {
    PageId page = 0;
    std::uint64_t used = 0;  // when, in calls of find and insert
    std::map<PageTokens, std::unique_ptr<Node>> children;
  };
  using Children = std::map<PageTokens, std::unique_ptr<Node>>;
  struct Step {
    Node* node = nullptr;  // the child that agrees longest
    int positions = 0;     // on so many tokens
  };
  static Step longest(Children& children, const PageTokens& wanted);
  template <typename Visit>
  int walk(std::span<const TokenId> tokens, Visit visit);
  void remember(std::span<const TokenId> tokens, std::span<const PageId> pages);
  bool drop_oldest(bool unused_only);

  PagePool& pool_;
  const std::size_t max_pages_;
  mutable std::mutex mutex_;
  Node root_;
  std::size_t count_ = 0;
  std::uint64_t clock_ = 0;
  const ForkHandler fork_handler_{[this] { mutex_.lock(); }, [this](bool) { mutex_.unlock(); }};
};

}  // namespace metal_prefill
