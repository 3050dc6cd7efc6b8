// Shuffles with filling data, and the results of votes, based on a backend's shuffles.
#pragma once

namespace metal {

// Values from outside a group of `modulo` lanes are taken from the other end of `filling`.
#define MSL_FILL(prefix, width)                                                                        \
  template <class T>                                                                                   \
  MSL_INLINE T prefix##_shuffle_and_fill_up(T value, T filling, ushort delta, ushort modulo = width,   \
                                            MSL_SITE) {                                                \
    const int lane = msl::lane() & (width - 1), base = lane - lane % modulo, inner = lane - base;      \
    const ushort source = static_cast<ushort>(base + (inner - delta + 2 * modulo) % modulo);           \
    const T kept = prefix##_shuffle(value, source, MSL_HERE),                                          \
            filled = prefix##_shuffle(filling, source, MSL_HERE);                                      \
    return inner < delta ? filled : kept;                                                              \
  }                                                                                                    \
  template <class T>                                                                                   \
  MSL_INLINE T prefix##_shuffle_and_fill_down(T value, T filling, ushort delta, ushort modulo = width, \
                                              MSL_SITE) {                                              \
    const int lane = msl::lane() & (width - 1), base = lane - lane % modulo, inner = lane - base;      \
    const ushort source = static_cast<ushort>(base + (inner + delta) % modulo);                        \
    const T kept = prefix##_shuffle(value, source, MSL_HERE),                                          \
            filled = prefix##_shuffle(filling, source, MSL_HERE);                                      \
    return inner + delta >= modulo ? filled : kept;                                                    \
  }
MSL_FILL(simd, 32)
MSL_FILL(quad, 4)

#define MSL_VOTE_TYPE(prefix, full)                                \
  class prefix##_vote {                                            \
   public:                                                         \
    typedef ulong vote_t;                                          \
    prefix##_vote() = default;                                     \
    explicit constexpr prefix##_vote(vote_t bits) : bits_(bits) {} \
    explicit constexpr operator vote_t() const {                   \
      return bits_;                                                \
    }                                                              \
    constexpr bool all() const {                                   \
      return bits_ == full;                                        \
    }                                                              \
    constexpr bool any() const {                                   \
      return bits_ != 0;                                           \
    }                                                              \
                                                                   \
   private:                                                        \
    vote_t bits_;                                                  \
  };
MSL_VOTE_TYPE(simd, 0xfffffffful)
MSL_VOTE_TYPE(quad, 0xful)

}  // namespace metal
