#include "untracked.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "emulator.h"

namespace metal_emulator {
namespace {

// The last encoder that updated a fence.
struct Updated {
  const void* queue;
  std::uint64_t number;
  std::set<std::uint64_t> after;
};

// Committed command buffers that the host has not seen completed, in order of commit.
struct Pending {
  std::mutex mutex;
  std::vector<std::shared_ptr<UntrackedUse>> uses;
  std::map<const void*, Updated> fences;
};

void order_after(EncoderUse& encoder, std::uint64_t number, const std::set<std::uint64_t>& before_it) {
  encoder.after.insert(number);
  encoder.after.insert(before_it.begin(), before_it.end());
}

}  // namespace

void UntrackedUse::wait_for(const void* fence) {
  open_.waits.push_back(fence);
  const auto updater = std::find_if(ended_.rbegin(), ended_.rend(), [&](const EncoderUse& encoder) {
    return std::find(encoder.updates.begin(), encoder.updates.end(), fence) != encoder.updates.end();
  });
  if (updater != ended_.rend()) order_after(open_, updater->number, updater->after);
}

void UntrackedUse::update(const void* fence) {
  open_.updates.push_back(fence);
}

std::optional<std::string> UntrackedUse::find_conflict(std::span<const Access> accesses) const {
  for (const EncoderUse& earlier : ended_) {
    if (open_.after.contains(earlier.number)) continue;
    if (auto conflict = earlier.tracker.find_conflict(accesses, kNoFence)) return conflict;
  }
  return std::nullopt;
}

void UntrackedUse::add(std::vector<Access> accesses) {
  open_.tracker.add(std::move(accesses));
}

void UntrackedUse::end_encoder() {
  static std::atomic<std::uint64_t> next{1};
  open_.number = next++;
  ended_.push_back(std::exchange(open_, {}));
}

void UntrackedUse::commit(const std::shared_ptr<UntrackedUse>& use) {
  auto& pending = the_only<Pending>();
  std::lock_guard lock(pending.mutex);
  std::set<std::uint64_t> unfinished;
  for (const auto& earlier : pending.uses)
    for (const EncoderUse& encoder : earlier->ended_) unfinished.insert(encoder.number);
  auto fences = pending.fences;
  bool uses_any = false;
  for (EncoderUse& encoder : use->ended_) {
    for (const void* fence : encoder.waits)
      if (const auto found = fences.find(fence); found != fences.end() && found->second.queue == use->queue_)
        order_after(encoder, found->second.number, found->second.after);
    for (const auto& earlier : pending.uses)
      for (const EncoderUse& other : earlier->ended_) {
        if (encoder.after.contains(other.number)) continue;
        if (const auto conflict = other.tracker.find_conflict(encoder.tracker.accesses(), kNoWait))
          throw ValidationError("commit: " + *conflict);
      }
    // Command buffers that the host has seen completed precede all others.
    std::erase_if(encoder.after, [&](std::uint64_t number) { return !unfinished.contains(number); });
    unfinished.insert(encoder.number);
    for (const void* fence : encoder.updates) fences[fence] = {use->queue_, encoder.number, encoder.after};
    uses_any = uses_any || !encoder.tracker.accesses().empty();
  }
  pending.fences = std::move(fences);
  if (uses_any) pending.uses.push_back(use);
}

void UntrackedUse::observe(UntrackedUse& use) {
  auto& pending = the_only<Pending>();
  std::lock_guard lock(pending.mutex);
  const auto found = std::find_if(pending.uses.begin(), pending.uses.end(),
                                  [&](const auto& other) { return other.get() == &use; });
  if (found == pending.uses.end()) return;
  const auto end = std::remove_if(pending.uses.begin(), std::next(found),
                                  [&](const auto& other) { return other->queue_ == use.queue_; });
  pending.uses.erase(end, std::next(found));
}

void UntrackedUse::forget(const Allocation& memory) {
  auto& pending = the_only<Pending>();
  std::lock_guard lock(pending.mutex);
  for (const auto& use : pending.uses)
    for (EncoderUse& encoder : use->ended_) encoder.tracker.forget(memory);
}

void UntrackedUse::forget_fence(const void* fence) {
  auto& pending = the_only<Pending>();
  std::lock_guard lock(pending.mutex);
  pending.fences.erase(fence);
}

}  // namespace metal_emulator
