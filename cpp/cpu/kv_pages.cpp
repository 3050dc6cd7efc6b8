#include "kv_pages.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

namespace metal_prefill::cpu {

KvPages::KvPages(const Config& config, KvType type, bool poison)
    : type_(type),
      poison_(poison),
      n_layers_(config.n_layers),
      n_heads_(config.n_kv_heads),
      key_dim_(config.key_dim),
      value_dim_(config.value_dim),
      value_stride_(int(round_up(std::size_t(config.value_dim), kFloatPad))),
      key_bytes_(std::size_t(kPagePositions) * std::size_t(key_dim_) * element()),
      head_bytes_(key_bytes_ + std::size_t(kPagePositions) * std::size_t(value_stride_) * element()),
      page_bytes_(round_up(std::size_t(n_layers_) * std::size_t(n_heads_) * head_bytes_, 64)) {}

void KvPages::grow(std::size_t pages) {
  const std::scoped_lock lock(mutex_);
  if (pages <= pages_.size()) return;
  const std::size_t added = pages - pages_.size();
  pages_.reserve(pages);
  slabs_.reserve(slabs_.size() + 1);
  Buffer slab(added * page_bytes_, "pages of the KV cache");
  for (std::size_t i = 0; i < added; ++i) pages_.push_back(slab.data() + i * page_bytes_);
  slabs_.push_back(std::move(slab));
}

void KvPages::copy(PageId from, PageId to, int positions) {
  std::byte* pages[2];
  addresses(std::array{from, to}, pages);
  const std::size_t keys = key_block(int(round_up(std::size_t(positions), kKeyBlock))),
                    values = value_row(positions);
  for (int layer = 0; layer < n_layers_; ++layer) {
    for (int head = 0; head < n_heads_; ++head) {
      const std::size_t k = this->keys(layer, head), v = this->values(layer, head);
      std::memcpy(pages[1] + k, pages[0] + k, keys);
      std::memcpy(pages[1] + v, pages[0] + v, values);
    }
  }
}

void KvPages::taken(PageId page) {
  if (!poison_) return;
  const std::scoped_lock lock(mutex_);
  fill_with_nan(pages_[page]);
}

void KvPages::idle(PageId page) {
  const std::scoped_lock lock(mutex_);
  release_pages(pages_[page], page_bytes_);
}

void KvPages::fill_with_nan(std::byte* page) const {
  std::memset(page, 0xff, page_bytes_);  // NaN in half precision as in float32
}

std::size_t KvPages::keys(int layer, int head) const {
  return (std::size_t(layer) * std::size_t(n_heads_) + std::size_t(head)) * head_bytes_;
}

std::size_t KvPages::values(int layer, int head) const {
  return keys(layer, head) + key_bytes_;
}

std::size_t KvPages::key_block(int position) const {
  return std::size_t(position / kKeyBlock * kKeyBlock) * std::size_t(key_dim_) * element();
}

std::size_t KvPages::value_row(int position) const {
  return std::size_t(position) * std::size_t(value_stride_) * element();
}

void KvPages::addresses(std::span<const PageId> pages, std::byte** out) const {
  const std::scoped_lock lock(mutex_);
  for (const PageId page : pages) *out++ = pages_[page];
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

template <typename Copy>
void KvPages::each_piece(std::span<const PageId> pages, int layer, bool values, int positions,
                         std::byte* canonical, Copy copy) const {
  const int dim = values ? value_dim_ : key_dim_;
  const std::size_t head_bytes = std::size_t(dim) * element();
  const std::size_t row_bytes = std::size_t(n_heads_) * head_bytes;
  for (int position = 0; position < positions; position += kKeyBlock) {
    std::byte* page;
    addresses({&pages[std::size_t(position) / kPagePositions], 1}, &page);
    const int in_page = position % kPagePositions, rows = std::min(kKeyBlock, positions - position);
    for (int head = 0; head < n_heads_; ++head) {
      std::byte* rows_of_head =
          canonical + std::size_t(position) * row_bytes + std::size_t(head) * head_bytes;
      const Matrix own = values ? Matrix{page + this->values(layer, head) + value_row(in_page),
                                         std::size_t(value_stride_) * element(), element()}
                                : Matrix{page + keys(layer, head) + key_block(in_page), element(),
                                         std::size_t(kKeyBlock) * element()};
      copy(rows, dim, Matrix{rows_of_head, row_bytes, element()}, own);
    }
  }
}

void KvPages::read(std::span<const PageId> pages, int layer, bool values, int positions,
                   std::byte* out) const {
  each_piece(pages, layer, values, positions, out,
             [&](int rows, int columns, const Matrix& canonical, const Matrix& own) {
               copy_matrix(rows, columns, element(), own, canonical);
             });
}

void KvPages::write(std::span<const PageId> pages, int layer, bool values, int positions,
                    const std::byte* in) {
  each_piece(pages, layer, values, positions, const_cast<std::byte*>(in),  // only read from
             [&](int rows, int columns, const Matrix& canonical, const Matrix& own) {
               copy_matrix(rows, columns, element(), canonical, own);
             });
}

}  // namespace metal_prefill::cpu
