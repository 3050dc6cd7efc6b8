#include "kv_cache.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

namespace metal_prefill::cpu {

KvCache::KvCache(const Config& config, KvType type, int max_context)
    : type_(type),
      n_layers_(config.n_layers),
      n_heads_(config.n_kv_heads),
      key_dim_(config.key_dim),
      value_dim_(config.value_dim),
      value_stride_(int(round_up(std::size_t(config.value_dim), kFloatPad))),
      max_capacity_(int(round_up(std::size_t(max_context), kKeySpan))) {}

std::size_t KvCache::key_head_bytes(int capacity) const {
  return std::size_t(capacity) * std::size_t(key_dim_) * element();
}

std::size_t KvCache::value_head_bytes(int capacity) const {
  return std::size_t(capacity) * std::size_t(value_stride_) * element();
}

void KvCache::reserve(int positions) {
  if (positions <= capacity_) return;
  // Half as much again: growing token by token copies each position a constant number of times.
  const int wanted = std::max(positions, capacity_ + capacity_ / 2);
  const int capacity = std::min(max_capacity_, int(round_up(std::size_t(wanted), kKeySpan)));
  const std::size_t n = std::size_t(n_layers_) * std::size_t(n_heads_);
  const std::size_t old_keys = key_head_bytes(capacity_), old_head = old_keys + value_head_bytes(capacity_);
  const std::size_t new_keys = key_head_bytes(capacity), new_head = new_keys + value_head_bytes(capacity);
  Buffer grown(n * new_head, "the KV cache");
  for (std::size_t head = 0; head < n && capacity_ > 0; ++head) {
    const std::byte* from = data_.data() + head * old_head;
    std::byte* to = grown.data() + head * new_head;
    std::memcpy(to, from, old_keys);
    std::memcpy(to + new_keys, from + old_keys, old_head - old_keys);
  }
  data_ = std::move(grown);
  capacity_ = capacity;
}

std::size_t KvCache::bytes() const {
  return data_.bytes();
}

std::byte* KvCache::keys(int layer, int head) const {
  return data_.data() + (std::size_t(layer) * std::size_t(n_heads_) + std::size_t(head)) *
                            (key_head_bytes(capacity_) + value_head_bytes(capacity_));
}

std::byte* KvCache::values(int layer, int head) const {
  return keys(layer, head) + key_head_bytes(capacity_);
}

std::byte* KvCache::key_block(int layer, int head, int position) const {
  return keys(layer, head) +
         std::size_t(position / kKeyBlock * kKeyBlock) * std::size_t(key_dim_) * element();
}

std::byte* KvCache::value_row(int layer, int head, int position) const {
  return values(layer, head) + std::size_t(position) * std::size_t(value_stride_) * element();
}

namespace {

// A matrix of elements, with the bytes from one row, and from one column, to the next.
struct Matrix {
  std::byte* data;
  std::size_t row, column;

  Matrix at(int r, int c) const {
    return {data + std::size_t(r) * row + std::size_t(c) * column, row, column};
  }
};

template <std::size_t kElement>
void copy_elements(int rows, int columns, const Matrix& from, const Matrix& to) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) std::memcpy(to.at(r, c).data, from.at(r, c).data, kElement);
}

using Row = std::uint16_t __attribute__((vector_size(16)));

// Elements of a and b in turns, of their first halves and of their second ones. GCC has the builtin of clang
// since version 12.
Row zip_low(Row a, Row b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return __builtin_shuffle(a, b, Row{0, 8, 1, 9, 2, 10, 3, 11});
#endif
}
Row zip_high(Row a, Row b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shuffle(a, b, Row{4, 12, 5, 13, 6, 14, 7, 15});
#endif
}

// 8x8 elements of two bytes, from contiguous rows to contiguous columns: three perfect shuffles transpose
// them.
void copy_tile(const Matrix& from, const Matrix& to) {
  std::array<Row, 8> rows, zipped;
  for (std::size_t r = 0; r < 8; ++r) std::memcpy(&rows[r], from.data + r * from.row, sizeof(Row));
  for (int shuffle = 0; shuffle < 3; ++shuffle) {
    for (std::size_t r = 0; r < 4; ++r) {
      zipped[2 * r] = zip_low(rows[r], rows[r + 4]);
      zipped[2 * r + 1] = zip_high(rows[r], rows[r + 4]);
    }
    rows = zipped;
  }
  for (std::size_t c = 0; c < 8; ++c) std::memcpy(to.data + c * to.column, &rows[c], sizeof(Row));
}

void copy_tiles(int rows, int columns, const Matrix& from, const Matrix& to) {
  const int whole_rows = rows / 8 * 8, whole_columns = columns / 8 * 8;
  for (int r = 0; r < whole_rows; r += 8)
    for (int c = 0; c < whole_columns; c += 8) copy_tile(from.at(r, c), to.at(r, c));
  copy_elements<2>(whole_rows, columns - whole_columns, from.at(0, whole_columns), to.at(0, whole_columns));
  copy_elements<2>(rows - whole_rows, columns, from.at(whole_rows, 0), to.at(whole_rows, 0));
}

void copy(int rows, int columns, std::size_t element, const Matrix& from, const Matrix& to) {
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

template <typename Copy>
void KvCache::each_piece(int layer, bool values, int positions, std::byte* canonical, Copy copy) const {
  const int dim = values ? value_dim_ : key_dim_;
  const std::size_t head_bytes = std::size_t(dim) * element();
  const std::size_t row_bytes = std::size_t(n_heads_) * head_bytes;
  for (int position = 0; position < positions; position += kKeyBlock) {
    const int rows = std::min(kKeyBlock, positions - position);
    for (int head = 0; head < n_heads_; ++head) {
      std::byte* rows_of_head =
          canonical + std::size_t(position) * row_bytes + std::size_t(head) * head_bytes;
      copy(rows, dim, Matrix{rows_of_head, row_bytes, element()},
           values
               ? Matrix{value_row(layer, head, position), std::size_t(value_stride_) * element(), element()}
               : Matrix{key_block(layer, head, position), element(), std::size_t(kKeyBlock) * element()});
    }
  }
}

void KvCache::read(int layer, bool values, int positions, std::byte* out) const {
  each_piece(layer, values, positions, out,
             [&](int rows, int columns, const Matrix& canonical, const Matrix& own) {
               copy(rows, columns, element(), own, canonical);
             });
}

void KvCache::write(int layer, bool values, int positions, const std::byte* in) {
  each_piece(layer, values, positions, const_cast<std::byte*>(in),  // only read from
             [&](int rows, int columns, const Matrix& canonical, const Matrix& own) {
               copy(rows, columns, element(), canonical, own);
             });
}

}  // namespace metal_prefill::cpu
