#include "kernel_workloads.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "cpu/kv_pages.h"
#include "cpu/ops.h"

namespace metal_prefill::cpu {

namespace {

constexpr std::size_t kMaxWorkload = std::size_t(1) << 30;
constexpr std::size_t kColdBytes = std::size_t(128) << 20;  // more than the caches hold

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Allocates rows in these formats, with random values in float32 only.
Activations random_rows(Buffer& memory, int rows, int cols, const Forms& forms = {}) {
  Activations out;
  memory = reserve_rows(cols, forms, rows, out);
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> values(-1.0f, 1.0f);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c) out.f32.row(r)[c] = values(random);
  return out;
}

struct ProductState {
  const Kernels& kernels;
  Buffer file, packed, input, output;
  std::vector<Linear> copies;
  std::vector<Scratch> scratch;
  Activations x;
  FloatRows out;
  int tokens;
};

struct AttentionState {
  const Kernels& kernels;
  Config config;
  LayerWeights weights;
  std::unique_ptr<KvPages> cache;
  std::vector<std::byte*> pages;
  std::vector<QueryTile> tiles;
  Buffer q_memory, k_memory, v_memory, out_memory;
  FloatRows q, k, v, out;
  std::vector<Scratch> scratch;
};

Compute compute_named(const std::string& name) {
  if (name == "int8") return Compute::kInt8;
  if (name == "bf16") return Compute::kBf16;
  if (name == "w8a8") return Compute::kW8A8;
  throw std::invalid_argument("compute must be int8, bf16 or w8a8, not " + name);
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

std::unique_ptr<Workload> product_workload(const std::string& set, std::uint32_t type, int rows, int cols,
                                           int tokens, int threads, const std::string& compute) {
  const Kernels& kernels = kernels_named(set);
  require(rows >= 1 && tokens >= 1 && threads >= 1, "rows, tokens and threads must be positive");
  require(cols >= kBlockCols && cols % kBlockCols == 0, "cols must be a multiple of 32");
  auto work = std::make_shared<ProductState>(ProductState{.kernels = kernels, .tokens = tokens});
  ProductState& w = *work;
  const std::size_t bytes = row_bytes(TensorType(type), std::size_t(cols)) * std::size_t(rows);
  require(bytes < kMaxWorkload && std::size_t(rows) * std::size_t(tokens) * sizeof(float) < kMaxWorkload,
          "the workload takes more than 1 GiB");
  w.file = Buffer(bytes, "weights");
  std::minstd_rand random(1);
  // Any two of these bytes form a normal float16, so that scales are neither infinite nor subnormal.
  for (std::size_t i = 0; i < bytes; ++i) w.file.data()[i] = std::byte(0x20 | (random() >> 8 & 0x1f));
  const Tensor tensor{"weight", TensorType(type), rows, cols, w.file.data(), bytes};

  Linear linear = linear_of(tensor, compute_named(compute), kernels);
  PackedMatrix& matrix = linear.packed;
  const std::size_t packed = matrix.group_bytes() * std::size_t(matrix.groups());
  const std::size_t n_copies = packed > 0 ? 1 + kColdBytes / packed : 1;
  w.packed = Buffer(packed * n_copies, "packed weights");
  Buffer memory(std::max<std::size_t>(packing_bytes_of(linear), 1), "weights while they are packed");
  for (std::size_t i = 0; i < n_copies; ++i) {
    std::byte* blocks = w.packed.data() + i * packed;
    matrix.blocks = blocks;
    if (i > 0) {
      std::memcpy(blocks, w.packed.data(), packed);
    } else if (packed > 0) {
      for (int group = 0; group < matrix.groups(); ++group) pack(linear, group, kernels, memory.data());
    }
    w.copies.push_back(linear);
  }

  w.scratch.resize(std::size_t(threads));
  for (Scratch& scratch : w.scratch) scratch.weights = Buffer(scratch_bytes_of(linear), "weights");
  Forms forms;
  forms.add(linear);
  forms.rests = linear.rotated() && kernels.limit_pairs;
  w.x = random_rows(w.input, tokens, cols, forms);
  Team(1).run([&](Worker& worker) { round_rows({worker, kernels, w.scratch[0]}, w.x, 0, tokens, 0, cols); });
  w.out = random_rows(w.output, tokens, rows).f32;
  return std::make_unique<Workload>(
      threads,
      [work](Worker& worker, int i) {
        const Context c{worker, work->kernels, work->scratch[std::size_t(worker.index())]};
        multiply(c, {{work->copies[std::size_t(i) % work->copies.size()], work->out}}, NormedRows(work->x),
                 work->tokens);
      },
      double(rows) * double(cols) * double(tokens), double(packed > 0 ? packed : bytes));
}

std::unique_ptr<Workload> attention_workload(const std::string& set, int tokens, int heads, int kv_heads,
                                             int head_dim, int threads) {
  const Kernels& kernels = kernels_named(set);
  require(tokens >= 1 && kv_heads >= 1 && heads >= kv_heads && heads % kv_heads == 0 && threads >= 1,
          "tokens, heads, kv_heads and threads must be positive, and heads a multiple of kv_heads");
  require(head_dim >= 1 && head_dim <= 512, "head_dim must be between 1 and 512");
  auto work = std::make_shared<AttentionState>(AttentionState{.kernels = kernels});
  AttentionState& w = *work;
  w.config.n_layers = 1;
  w.config.n_heads = heads;
  w.config.n_kv_heads = kv_heads;
  w.config.key_dim = w.config.value_dim = head_dim;
  w.cache = std::make_unique<KvPages>(w.config, kernels.half_layout, kernels.key_multiple, tokens, false);
  std::vector<PageId> pages(pages_of(tokens));
  std::iota(pages.begin(), pages.end(), PageId(0));
  w.cache->grow(pages.size());
  w.pages.resize(pages.size());
  w.cache->addresses(pages, w.pages.data());
  std::vector<Row> rows;
  for (int t = 0; t < tokens; ++t) rows.push_back({0, 0, t, t, w.pages.data()});
  add_tiles(w.tiles, rows, 0, query_tile_rows(tokens, kv_heads, threads), rows.back().position + 1);
  std::reverse(w.tiles.begin(), w.tiles.end());  // as in a pass: the largest first
  w.q = random_rows(w.q_memory, tokens, heads * head_dim).f32;
  w.k = random_rows(w.k_memory, tokens, kv_heads * head_dim).f32;
  w.v = random_rows(w.v_memory, tokens, kv_heads * head_dim).f32;
  w.out = random_rows(w.out_memory, tokens, heads * head_dim).f32;
  for (int t = 0; t < tokens; t += kKeyBlock) {
    std::byte* page = w.pages[std::size_t(t / kPagePositions)];
    const int in_page = t % kPagePositions, count = std::min(kKeyBlock, tokens - t);
    for (int h = 0; h < kv_heads; ++h) {
      kernels.store_keys(w.k.row(t) + h * head_dim, w.k.stride, count, head_dim, w.cache->key_stride(0),
                         kernels.half_layout, page + w.cache->keys(0, h), in_page);
      kernels.store_values(w.v.row(t) + h * head_dim, w.v.stride, count, head_dim, w.cache->value_stride(0),
                           kernels.half_layout, page + w.cache->values(0, h), in_page);
    }
  }
  w.scratch.resize(std::size_t(threads));
  const double pairs = double(tokens) * (double(tokens) + 1) / 2;  // of a query and a key that it sees
  return std::make_unique<Workload>(
      threads,
      [work](Worker& worker, int) {
        const Context c{worker, work->kernels, work->scratch[std::size_t(worker.index())]};
        const AttentionStep step{
            .config = work->config,
            .weights = work->weights,
            .cache = *work->cache,
            .layer = 0,
            .rotations = nullptr,
            .q = work->q,
            .k = work->k,
            .v = work->v,
        };
        const AttentionItems items(step, work->tiles, worker.count());
        attend(c, step, items, {},
               {.forms = {.f32 = true}, .f32 = work->out, .int8 = {}, .super = {}, .bfloat16 = {}});
      },
      pairs * heads * 2 * head_dim, 0);
}

}  // namespace metal_prefill::cpu
