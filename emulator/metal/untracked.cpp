#include "untracked.h"

#include <algorithm>
#include <iterator>
#include <mutex>

#include "emulator.h"

namespace metal_emulator {
namespace {

// Committed command buffers whose completion the host has not seen, in order of commit. Never destroyed.
struct Pending {
  std::mutex mutex;
  std::vector<std::shared_ptr<UntrackedUse>> uses;

  static Pending& get() {
    static auto* instance = new Pending;
    return *instance;
  }
};

}  // namespace

std::optional<std::string> UntrackedUse::find_conflict(std::span<const Access> accesses) const {
  return earlier_.find_conflict(accesses, kNoFence);
}

void UntrackedUse::add(std::vector<Access> accesses) {
  std::copy(accesses.begin(), accesses.end(), std::back_inserter(accesses_));
  earlier_.add(std::move(accesses));
}

void UntrackedUse::commit(const std::shared_ptr<UntrackedUse>& use) {
  if (use->accesses_.empty()) return;
  Pending& pending = Pending::get();
  std::lock_guard lock(pending.mutex);
  for (const auto& earlier : pending.uses) {
    if (const auto conflict = earlier->earlier_.find_conflict(use->accesses_, kNoWait)) {
      throw ValidationError("commit: " + *conflict);
    }
  }
  pending.uses.push_back(use);
}

void UntrackedUse::observe(UntrackedUse& use) {
  Pending& pending = Pending::get();
  std::lock_guard lock(pending.mutex);
  const auto found = std::find_if(pending.uses.begin(), pending.uses.end(),
                                  [&](const auto& other) { return other.get() == &use; });
  if (found == pending.uses.end()) return;
  const auto end = std::remove_if(pending.uses.begin(), std::next(found),
                                  [&](const auto& other) { return other->queue_ == use.queue_; });
  pending.uses.erase(end, std::next(found));
}

void UntrackedUse::forget(const Allocation& memory) {
  Pending& pending = Pending::get();
  std::lock_guard lock(pending.mutex);
  const Allocation* const gone = &memory;
  for (const auto& use : pending.uses) use->earlier_.barrier({&gone, 1});
}

}  // namespace metal_emulator
