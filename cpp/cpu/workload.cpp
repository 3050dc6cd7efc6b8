#include "workload.h"

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "buffer.h"
#include "kernels/kernels.h"

namespace metal_prefill::cpu {

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace

double Workload::run(int repetitions) {
  require(repetitions >= 0, "repetitions must not be negative");
  const int first = next_;
  next_ = (first + repetitions) % (1 << 20);
  const auto begin = std::chrono::steady_clock::now();
  team_.run([&](Worker& worker) {
    for (int i = 0; i < repetitions; ++i) body_(worker, first + i);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::vector<std::string> peaks(const std::string& set) {
  std::vector<std::string> names = {"int8", "float32", "memory"};
  if (kernels_named(set).run_bfloat16) names.insert(names.begin() + 2, "bfloat16");
  return names;
}

std::unique_ptr<Workload> peak_workload(const std::string& set, const std::string& what, int threads) {
  const Kernels& kernels = kernels_named(set);
  require(threads >= 1, "threads must be positive");
  if (what == "memory") {
    auto memory = std::make_shared<Buffer>(kColdBytes, "memory to read");
    std::memset(memory->data(), 1, memory->bytes());
    constexpr int kItems = 256;
    auto sums = std::make_shared<std::vector<std::uint64_t>>(kItems);
    return std::make_unique<Workload>(
        threads,
        [memory, sums](Worker& worker, int) {
          worker.for_each(kItems, [&](int item) {
            const std::size_t n = memory->bytes() / sizeof(std::uint64_t) / kItems;
            const std::uint64_t* p = memory->as<std::uint64_t>() + std::size_t(item) * n;
            std::uint64_t sum[8] = {};  // the compiler makes vectors of them
            for (std::size_t i = 0; i < n; i += 8)
              for (int j = 0; j < 8; ++j) sum[j] += p[i + std::size_t(j)];
            for (const std::uint64_t s : sum) (*sums)[std::size_t(item)] += s;
          });
        },
        0, double(kColdBytes));
  }
  const auto loop = what == "int8"       ? kernels.run_dots
                    : what == "float32"  ? kernels.run_fmas
                    : what == "bfloat16" ? kernels.run_bfloat16
                                         : nullptr;
  if (!loop) throw std::invalid_argument("the kernel set '" + set + "' has no limit '" + what + "'");
  constexpr int kRounds = 1000;  // some microseconds
  const double products = loop(kRounds);
  return std::make_unique<Workload>(
      threads,
      [loop](Worker& worker, int) {
        // One item for each thread.
        worker.for_each(worker.count(), [&](int) { loop(kRounds); });
      },
      products * threads, 0);
}

}  // namespace metal_prefill::cpu
