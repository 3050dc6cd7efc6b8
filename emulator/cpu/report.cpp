// Messages of the fiber executor: the kernel, the threadgroup, and the line at which each thread waits.
#include <bit>
#include <utility>

#include "threadgroup.h"

namespace metal_emulator::cpu {

using abi::u32;

namespace {

constexpr unsigned kShownSimdgroups = 6;

// Formats a set of lanes, such as "0-3,7".
std::string lane_ranges(u32 lanes) {
  std::string text;
  for (unsigned i = 0; i < 32; i++) {
    if (!(lanes >> i & 1)) continue;
    unsigned last = i;
    while (last < 31 && (lanes >> (last + 1) & 1)) last++;
    if (!text.empty()) text += ",";
    text += std::to_string(i);
    if (last > i) text += "-" + std::to_string(last);
    i = last;
  }
  return text;
}

}  // namespace

std::string ThreadgroupRunner::describe_simdgroup(unsigned group) const {
  const abi::Simdgroup& simdgroup = simdgroups_[group];
  const u32 all = count_ - group * abi::kLanes >= 32 ? ~0u : (1u << (count_ - group * abi::kLanes)) - 1;
  const auto describe = [&](unsigned lane) -> std::string {
    const Thread& thread = threads_[group * abi::kLanes + lane];
    const u32 bit = 1u << lane;
    if (!(simdgroup.active & bit)) return "returned";
    if (simdgroup.fresh & bit) return "not started";
    if (simdgroup.ready & bit) return "running";
    const char* what = simdgroup.waiting & bit ? thread.operation->name : "threadgroup_barrier";
    return "at " + std::string(what) + " " + text_of(thread.place);
  };
  std::string text = "\n  simdgroup " + std::to_string(group) + ":";
  for (u32 left = all; left;) {
    const std::string state = describe(static_cast<unsigned>(std::countr_zero(left)));
    u32 same = 0;
    for (u32 lanes = left; lanes; lanes &= lanes - 1) {
      if (describe(static_cast<unsigned>(std::countr_zero(lanes))) == state) same |= lanes & (0 - lanes);
    }
    text += (left == all ? " lanes " : "; lanes ") + lane_ranges(same) + " " + state;
    left &= ~same;
  }
  return text;
}

std::string ThreadgroupRunner::describe_product(unsigned group, int number) const {
  const abi::MatrixProduct& product = simdgroups_[group].queue->products[number];
  std::string text = "divergence at the matrix product " + text_of({product.file, product.line}) +
                     ": simdgroup " + std::to_string(group) + ": ";
  if (product.differs) return text + "lanes ask for different products" + describe_simdgroup(group);
  return text + "only lanes " + lane_ranges(product.lanes) + " ask for it" + describe_simdgroup(group);
}

std::string ThreadgroupRunner::describe_divergence() const {
  for (unsigned i = 1; i < simdgroup_count_; i++) {
    const Together &first = together_[0], &other = together_[i];
    if (first.count == other.count && first.which == other.which) continue;
    const auto describe = [](const Together& some) {
      return std::to_string(some.count) + (some.count ? ", the last at " + text_of(some.place) : "");
    };
    return "divergence: simdgroups execute different operations of the whole threadgroup: simdgroup 0 " +
           describe(first) + "; simdgroup " + std::to_string(i) + " " + describe(other);
  }
  return {};
}

void ThreadgroupRunner::fail_waiting(std::string problem) {
  for (unsigned i = 0; i < simdgroup_count_ && i < kShownSimdgroups; i++) problem += describe_simdgroup(i);
  if (simdgroup_count_ > kShownSimdgroups) {
    problem += "\n  and " + std::to_string(simdgroup_count_ - kShownSimdgroups) + " more simdgroups";
  }
  fail(std::move(problem));
}

// Ends the threadgroup from the running fiber. Waiting fibers are abandoned, as kernels own no resources.
void ThreadgroupRunner::fail(std::string message) {
  const auto coordinates = [](Dim3 at) {
    return "(" + std::to_string(at.x) + "," + std::to_string(at.y) + "," + std::to_string(at.z) + ")";
  };
  error_ = work_->label + ", threadgroup " + coordinates(position_) + ": " + std::move(message);
#if METAL_EMULATOR_TSAN
  __tsan_release(&sync_end_.byte);  // orders this thread's accesses before later ones of the host
#endif
  switch_to(&abi::current_fiber(), nullptr);
  __builtin_unreachable();
}

void ThreadgroupRunner::missed_guard(const Allocation& missed, std::size_t overrun, bool write) {
  ThreadgroupRunner& runner = of(abi::current_worker());
  const auto* begin = static_cast<const std::byte*>(const_cast<Allocation&>(missed).host());
  std::string binding = "a buffer that is not bound";
  for (const abi::Argument& argument : runner.work_->kernel->arguments) {
    if (argument.space == abi::Argument::Space::kThreadgroup) continue;
    const auto* bound = static_cast<const std::byte*>(runner.work_->buffers[argument.index]);
    if (bound >= begin && bound <= begin + missed.bytes) {
      binding = "buffer " + std::to_string(argument.index) + " ('" + argument.name + "', " +
                std::to_string(missed.bytes) + " bytes)";
      break;
    }
  }
  const abi::Fiber& fiber = abi::current_fiber();
  runner.fail(std::string(write ? "writes" : "reads") + " past the end of " + binding + " by " +
              std::to_string(overrun + 1) + " bytes, thread " + std::to_string(fiber.thread));
}

void ThreadgroupRunner::report_access(void* runner, std::string message) {
  const abi::Fiber& fiber = abi::current_fiber();
  static_cast<ThreadgroupRunner*>(runner)->fail(std::move(message) + ", thread " +
                                                std::to_string(fiber.thread));
}

}  // namespace metal_emulator::cpu
