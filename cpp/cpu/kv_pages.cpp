#include "kv_pages.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../base/release_pages.h"
#include "kernels/prefetch.h"
#include "kernels/transpose_halves.h"

namespace metal_prefill::cpu {

KvPages::KvPages(const Config& config, KvLayout layout, int key_multiple, int max_context, bool poison)
    : layout_(layout), poison_(poison), place_(attention_places(config)) {
  const LayerConfigs configs(config);
  for (int layer = 0; layer < config.n_layers; ++layer) {
    if (place_[std::size_t(layer)] < int(heads_.size())) continue;
    const Config& c = configs[layer];
    Heads heads = {.count = c.n_kv_heads, .key_dim = c.key_dim, .value_dim = c.value_dim};
    heads.key_stride = layout == KvLayout::kPairs ? round_up(c.key_dim, key_multiple) : c.key_dim;
    heads.value_stride = round_up(c.value_dim, kFloatPad);
    heads.key_bytes = span_bytes(layout, heads.key_stride);
    heads.head_bytes = heads.key_bytes + span_bytes(layout, heads.value_stride);
    heads_.push_back(heads);
  }
  const auto differs = [&](const Heads& heads) { return heads.head_bytes != heads_[0].head_bytes; };
  head_bytes_ = heads_.empty() ? 0 : heads_[0].head_bytes;
  if (std::none_of(heads_.begin(), heads_.end(), differs))
    group_ = std::clamp<std::size_t>(
        std::size_t(max_context) / kPositionsOfGrouped, 1,
        std::clamp<std::size_t>(kStretchBytes / std::max(head_bytes_, kLeastPage), 1, kMostGrouped));
  std::size_t bytes = 0;  // of a page
  for (Heads& heads : heads_) {
    heads.first = bytes * group_;
    bytes += std::size_t(heads.count) * heads.head_bytes;
  }
  // Without attention in any layer, pages only count positions.
  page_bytes_ = std::max(round_up(bytes, 64), kLeastPage);
}

void KvPages::grow(std::size_t pages) {
  const std::scoped_lock lock(mutex_);
  if (pages <= pages_.size()) return;
  const std::size_t added = pages - pages_.size();
  pages_.reserve(pages);
  slabs_.reserve(slabs_.size() + 1);
  groups_.reserve(groups_.size() + ceil_div(added, group_));
  Buffer slab(round_up(added, group_) * page_bytes_, "pages of the KV cache");
  for (std::size_t i = 0; i < added; ++i) {
    const std::size_t in_group = i % group_;
    if (in_group == 0) groups_.push_back({slab.data() + i * page_bytes_, 0});
    pages_.push_back({groups_.back().data + in_group * head_bytes_, groups_.size() - 1, false});
  }
  slabs_.push_back(std::move(slab));
}

void KvPages::copy(PageId from, PageId to, int positions) {
  std::byte* pages[2];
  addresses(std::array{from, to}, pages);
  for (const Heads& heads : heads_) {
    const auto [keys, values] = bytes_of_first(heads, positions);
    for (int head = 0; head < heads.count; ++head) {
      const std::size_t k = head_at(heads, head), v = k + heads.key_bytes;
      std::memcpy(pages[1] + k, pages[0] + k, keys);
      std::memcpy(pages[1] + v, pages[0] + v, values);
    }
  }
}

std::pair<std::size_t, std::size_t> KvPages::bytes_of_first(const Heads& heads, int positions) const {
  const bool q8 = layout_ == KvLayout::kQ8;  // scales are stored after the codes of all positions
  return {
      q8 || layout_ == KvLayout::kPairs ? heads.key_bytes : key_block(heads, round_up(positions, kKeyBlock)),
      q8 ? heads.head_bytes - heads.key_bytes : value_row(heads, round_up(positions, 2))};
}

void KvPages::fetch(const std::byte* page, int layer, int head, int positions) const {
  const auto [keys, values] = bytes_of_first(of(layer), positions);
  const bool lanes = layout_ == KvLayout::kPairs;  // the first positions are not contiguous
  const std::size_t step = lanes ? kKeyLaneStep : keys,
                    used = lanes ? std::size_t(positions) * kKeyLane : keys;
  for (std::size_t at = 0; at < keys; at += step)
    prefetch<CacheLevel::kL2>(page + this->keys(layer, head) + at, used);
  prefetch<CacheLevel::kL2>(page + this->values(layer, head), values);
}

void KvPages::taken(PageId page) {
  const std::scoped_lock lock(mutex_);
  Page& own = pages_[page];
  if (!own.taken) ++groups_[own.group].taken;
  own.taken = true;
  for (const Heads& heads : heads_) {
    // Products read the padding of keys, too: it must be zero.
    const std::size_t used =
        heads.key_stride == heads.key_dim ? heads.key_bytes : std::size_t(heads.key_dim / 2) * kKeyLaneStep;
    if (!poison_ && used == heads.key_bytes) continue;
    for (int head = 0; head < heads.count; ++head) {
      std::byte* data = own.data + head_at(heads, head);
      if (poison_) std::memset(data, 0xff, heads.head_bytes);  // NaN in all layouts
      std::memset(data + used, 0, heads.key_bytes - used);
    }
  }
}

// Frees the memory of a group once none of its pages is in use, as each layer has a part of every page.
void KvPages::idle(PageId page) {
  const std::scoped_lock lock(mutex_);
  Page& own = pages_[page];
  Group& group = groups_[own.group];
  if (own.taken && --group.taken == 0) release_pages(group.data, group_ * page_bytes_);
  own.taken = false;
}

std::size_t KvPages::key_block(const Heads& heads, int position) const {
  if (layout_ == KvLayout::kPairs) return std::size_t(position / kKeyBlock * kKeyBlock) * kKeyLane;
  return std::size_t(position / kKeyBlock * kKeyBlock) * std::size_t(heads.key_stride) * element();
}

std::size_t KvPages::value_row(const Heads& heads, int position) const {
  const std::size_t row = std::size_t(heads.value_stride) * element(), at = std::size_t(position);
  return layout_ == KvLayout::kPairs ? at / 2 * 2 * row + at % 2 * element() : at * row;
}

void KvPages::addresses(std::span<const PageId> pages, std::byte** out) const {
  const std::scoped_lock lock(mutex_);
  for (const PageId page : pages) *out++ = pages_[page].data;
}

// A matrix of elements, with the distances between rows and between columns in bytes.
struct KvPages::Matrix {
  std::byte* data;
  std::size_t row, column;

  Matrix at(int r, int c) const {
    return {data + std::size_t(r) * row + std::size_t(c) * column, row, column};
  }
};

namespace {

using Matrix = KvPages::Matrix;

template <std::size_t kElement>
void copy_elements(int rows, int columns, const Matrix& from, const Matrix& to) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) std::memcpy(to.at(r, c).data, from.at(r, c).data, kElement);
}

void copy_tiles(int rows, int columns, const Matrix& from, const Matrix& to) {
  const int whole_rows = rows / kHalvesTile * kHalvesTile,
            whole_columns = columns / kHalvesTile * kHalvesTile;
  for (int r = 0; r < whole_rows; r += kHalvesTile)
    for (int c = 0; c < whole_columns; c += kHalvesTile)
      transpose_halves(from.at(r, c).data, from.row, to.at(r, c).data, to.column);
  copy_elements<2>(whole_rows, columns - whole_columns, from.at(0, whole_columns), to.at(0, whole_columns));
  copy_elements<2>(rows - whole_rows, columns, from.at(whole_rows, 0), to.at(whole_rows, 0));
}

// Four elements as 32-bit integers.
using Words = std::uint32_t __attribute__((vector_size(16)));
using Floats = float __attribute__((vector_size(16)));

// `mask` is all ones or zero, the result of a comparison.
template <typename Mask>
Words select(Mask mask, Words yes, Words no) {
  return (Words(mask) & yes) | (~Words(mask) & no);
}

// Converts canonical f16 to the elements of pairs in a page, which were rounded from f16, so that a round
// trip changes nothing. A power of two converts the exponent, also of subnormal numbers.
Words bfloat16_of(Words half) {
  const Words sign = (half & 0x8000) << 16, magnitude = half & 0x7fff;
  const Words value = Words(Floats(magnitude << 13) * 0x1p112f);
  const Words rounded = value + 0x7fff + (value >> 16 & 1);
  const Words nan = select(magnitude > 0x7c00, Words{} + 0x00400000, Words{});
  return (sign | select(magnitude < 0x7c00, rounded, 0x7f800000 | magnitude << 13 | nan)) >> 16;
}
Words half_of(Words bfloat16) {
  const Words sign = bfloat16 & 0x8000, magnitude = (bfloat16 & 0x7fff) << 16;
  const Words value = Words(Floats(magnitude) * 0x1p-112f) >> 13;
  const Words nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
  // bfloat16 rounds the largest f16 number to 65536.
  const std::uint32_t large = std::bit_cast<std::uint32_t>(65536.0f);
  const Words infinite = select(magnitude == large, Words{} + 0x7bff, Words{} + 0x7c00);
  return sign | select(magnitude < large, value, select(magnitude > 0x7f800000, nan, infinite));
}

template <Words (*kConvert)(Words)>
void convert_row(const std::byte* in, int n, std::byte* out) {
  const auto convert = [&](std::size_t at, std::size_t bytes) {
    Halves row{};
    std::memcpy(&row, in + at, bytes);
    row = evens(Halves(kConvert(Words(zip_low(row, Halves{})))),
                Halves(kConvert(Words(zip_high(row, Halves{})))));
    std::memcpy(out + at, &row, bytes);
  };
  const std::size_t bytes = std::size_t(n) * 2, whole = bytes / sizeof(Halves) * sizeof(Halves);
  for (std::size_t at = 0; at < whole; at += sizeof(Halves)) convert(at, sizeof(Halves));
  if (whole < bytes) convert(whole, bytes - whole);
}

using Direction = KvPages::Direction;

// Copies between a page and canonical layout.
template <Direction kDirection>
void move_bytes(std::byte* page, std::byte* canonical, std::size_t bytes) {
  constexpr bool kRead = kDirection == Direction::kRead;
  std::memcpy(kRead ? canonical : page, kRead ? page : canonical, bytes);
}

// A row of pairs: kTogether adjacent elements at a time, kStride bytes apart. Keys are pairs of dimensions,
// interleaved over all positions; values are pairs of positions.
template <int kTogether, std::size_t kStride>
struct PairsRow {
  static constexpr std::size_t kPiece = 2 * kTogether;

  template <Direction kDirection>
  static void move(std::byte* page, int n, std::byte* row) {
    for (int i = 0; i < n / kTogether; ++i)
      move_bytes<kDirection>(page + i * kStride, row + i * kPiece, kPiece);
    if (n % kTogether) move_bytes<kDirection>(page + n / kTogether * kStride, row + 2 * (n - 1), 2);
  }
};
using KeyRow = PairsRow<2, kKeyLaneStep>;
using ValueRow = PairsRow<1, 4>;

// Offset of the first code of a position, and the number of adjacent codes, kStep bytes apart.
struct KeyCodes {
  static constexpr int kTogether = 4;
  static constexpr std::size_t kStep = kKeyLaneStep;
  static std::size_t first(int, int position) { return std::size_t(position) * kKeyLane; }
};
struct ValueCodes {
  static constexpr int kTogether = 1;
  static constexpr std::size_t kStep = 4;
  static std::size_t first(int dim, int position) { return q8_value(dim, position); }
};

// Copies the Q8_0 blocks of a position. In canonical layout, as in a model file, the scale precedes the
// signed codes. Codes in pages are 128 higher.
template <Direction kDirection, typename Codes>
void move_q8_row(std::byte* head, int dim, int position, std::byte* canonical) {
  constexpr std::size_t kScale = sizeof(std::uint16_t);
  constexpr auto kSign = std::byte(128);
  std::byte* own = head + Codes::first(dim, position);
  for (int block = 0; block < dim / kBlockCols; ++block) {
    move_bytes<kDirection>(head + q8_scale(dim, block, position), canonical, kScale);
    canonical += kScale;
    for (int i = 0; i < kBlockCols; i += Codes::kTogether, own += Codes::kStep)
      for (int j = 0; j < Codes::kTogether; ++j, ++canonical)
        if constexpr (kDirection == Direction::kRead)
          *canonical = own[j] ^ kSign;
        else
          own[j] = *canonical ^ kSign;
  }
}

void copy_matrix(int rows, int columns, std::size_t element, const Matrix& from, const Matrix& to) {
  if (from.column == element && to.column == element) {
    for (int r = 0; r < rows; ++r)
      std::memcpy(to.at(r, 0).data, from.at(r, 0).data, std::size_t(columns) * element);
  } else if (element == 4) {
    copy_elements<4>(rows, columns, from, to);
  } else if (from.column == element) {
    copy_tiles(rows, columns, from, to);
  } else {  // contiguous columns to contiguous rows
    copy_tiles(columns, rows, {from.data, from.column, from.row}, {to.data, to.column, to.row});
  }
}

}  // namespace

// Positions and dimensions of a piece of a page that interleaves the keys of 16 positions.
KvPages::Matrix KvPages::matrix(const Heads& heads, std::byte* own, bool values) const {
  if (values) return {own, std::size_t(heads.value_stride) * element(), element()};
  return {own, element(), kKeyBlock * element()};
}

template <Direction kDirection>
void KvPages::move_rows(const Heads& heads, int first, int rows, bool values, std::byte* canonical,
                        std::size_t row_bytes, std::byte* head) const {
  constexpr bool kRead = kDirection == Direction::kRead;
  const int dim = values ? heads.value_dim : heads.key_dim;
  if (layout_ == KvLayout::kQ8) {
    for (int r = 0; r < rows; ++r, canonical += row_bytes)
      values ? move_q8_row<kDirection, ValueCodes>(head, dim, first + r, canonical)
             : move_q8_row<kDirection, KeyCodes>(head, dim, first + r, canonical);
    return;
  }
  std::byte* own = head + (values ? value_row(heads, first) : key_block(heads, first));
  if (layout_ != KvLayout::kPairs) {
    const Matrix in_page = matrix(heads, own, values), outside = {canonical, row_bytes, element()};
    return copy_matrix(rows, dim, element(), kRead ? in_page : outside, kRead ? outside : in_page);
  }
  std::byte row[2 * kMaxHeadDim];
  for (int r = 0; r < rows; ++r, canonical += row_bytes) {
    if constexpr (!kRead) convert_row<bfloat16_of>(canonical, dim, row);
    values ? ValueRow::move<kDirection>(own + value_row(heads, r), dim, row)
           : KeyRow::move<kDirection>(own + KeyRow::kPiece * std::size_t(r), dim, row);
    if constexpr (kRead) convert_row<half_of>(row, dim, canonical);
  }
}

template <Direction kDirection>
void KvPages::move(std::span<const PageId> pages, int layer, bool values, int positions,
                   std::byte* canonical) const {
  const Heads& heads = of(layer);
  const int dim = values ? heads.value_dim : heads.key_dim;
  const std::size_t head_bytes = layout_ == KvLayout::kQ8 ? row_bytes(TensorType::kQ8_0, std::size_t(dim))
                                                          : std::size_t(dim) * element();
  const std::size_t row_bytes = std::size_t(heads.count) * head_bytes;
  for (int position = 0; position < positions; position += kKeyBlock) {
    std::byte* page;
    addresses({&pages[std::size_t(position) / kPagePositions], 1}, &page);
    const int first = position % kPagePositions, rows = std::min(kKeyBlock, positions - position);
    for (int head = 0; head < heads.count; ++head)
      move_rows<kDirection>(heads, first, rows, values,
                            canonical + std::size_t(position) * row_bytes + std::size_t(head) * head_bytes,
                            row_bytes, page + (values ? this->values(layer, head) : keys(layer, head)));
  }
}

void KvPages::read(std::span<const PageId> pages, int layer, bool values, int positions,
                   std::byte* out) const {
  move<Direction::kRead>(pages, layer, values, positions, out);
}

void KvPages::write(std::span<const PageId> pages, int layer, bool values, int positions,
                    const std::byte* in) {
  move<Direction::kWrite>(pages, layer, values, positions, const_cast<std::byte*>(in));  // only read from
}

}  // namespace metal_prefill::cpu
