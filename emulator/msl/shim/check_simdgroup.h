// Declarations of simdgroup functions for the static check, which calls none of them.
#pragma once

namespace metal {

void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

#define MSL_UNARY(function)   \
  template <class T>          \
  T simd_##function(T value); \
  template <class T>          \
  T quad_##function(T value);
MSL_UNARY(sum)
MSL_UNARY(product)
MSL_UNARY(max)
MSL_UNARY(min) MSL_UNARY(and) MSL_UNARY(or) MSL_UNARY(xor) MSL_UNARY(prefix_inclusive_sum)
    MSL_UNARY(prefix_exclusive_sum) MSL_UNARY(prefix_inclusive_product) MSL_UNARY(prefix_exclusive_product)
        MSL_UNARY(broadcast_first)
#define MSL_INDEXED(function)                  \
  template <class T>                           \
  T simd_##function(T value, ushort argument); \
  template <class T>                           \
  T quad_##function(T value, ushort argument);
            MSL_INDEXED(shuffle) MSL_INDEXED(broadcast) MSL_INDEXED(shuffle_xor) MSL_INDEXED(shuffle_up)
                MSL_INDEXED(shuffle_down) MSL_INDEXED(shuffle_rotate_up) MSL_INDEXED(shuffle_rotate_down)
#define MSL_FILL(function)                                                 \
  template <class T>                                                       \
  T simd_##function(T value, T filling, ushort delta, ushort modulo = 32); \
  template <class T>                                                       \
  T quad_##function(T value, T filling, ushort delta, ushort modulo = 4);
                    MSL_FILL(shuffle_and_fill_up) MSL_FILL(shuffle_and_fill_down)

#define MSL_VOTE_TYPE(prefix)                \
  class prefix##_vote {                      \
   public:                                   \
    typedef ulong vote_t;                    \
    prefix##_vote();                         \
    explicit prefix##_vote(vote_t bits);     \
    explicit operator vote_t() const;        \
    bool all() const;                        \
    bool any() const;                        \
  };                                         \
  bool prefix##_any(bool value);             \
  bool prefix##_all(bool value);             \
  bool prefix##_is_first();                  \
  prefix##_vote prefix##_ballot(bool value); \
  prefix##_vote prefix##_active_threads_mask();
                        MSL_VOTE_TYPE(simd) MSL_VOTE_TYPE(quad)

}  // namespace metal
