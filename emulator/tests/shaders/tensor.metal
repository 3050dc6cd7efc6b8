// Products on tensors, right and with one mistake each.
// clang-format off: the last of these builds on the others
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
// clang-format on

using namespace metal;
using namespace mpp::tensor_ops;

constant constexpr ushort kK = 32;

enum Mistake {
  kNone,
  kUnwrittenSum,    // added to, but not initialized
  kWrongSize,       // a tensor with other rows than the descriptor has
  kOneSimdgroup,    // only simdgroup 0 multiplies
  kOneLane,         // only lane 0 of each simdgroup multiplies
  kUnwrittenStore,  // stored before anything was computed
  kNoBarrier,       // reads operands that other threads may not have staged
};

// c[kM][kN] = a[kM][k] b[kN][k]^T. One threadgroup of kSimdgroups.
template <ushort kM, ushort kN, ushort kSimdgroups, Mistake mistake>
kernel void multiply(device const half* a [[buffer(0)]], device const half* b [[buffer(1)]],
                     device float* c [[buffer(2)]], constant uint& k [[buffer(3)]],
                     ushort thread_index [[thread_index_in_threadgroup]],
                     ushort lane [[thread_index_in_simdgroup]],
                     ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup half staged[(kM + kN) * kK];
  using Operand = tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline>;
  constexpr auto descriptor =
      matmul2d_descriptor(kM, kN, kK, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, execution_simdgroups<kSimdgroups>> product;
  auto sum = product.template get_destination_cooperative_tensor<Operand, Operand, float>();
  if (mistake != kUnwrittenSum && mistake != kUnwrittenStore)
    for (ushort i = 0; i < sum.get_capacity(); ++i)
      if (sum.is_valid_element(i)) sum[i] = 0.0f;

  for (uint done = 0; done < k && mistake != kUnwrittenStore; done += kK) {
    for (uint i = thread_index; i < (kM + kN) * kK; i += 32 * kSimdgroups) {
      const uint row = i / kK, column = done + i % kK;
      staged[i] = row < kM ? a[row * k + column] : b[(row - kM) * k + column];
    }
    if (mistake != kNoBarrier) threadgroup_barrier(mem_flags::mem_threadgroup);
    Operand left(staged, dextents<int32_t, 2>(kK, kM));
    Operand right(staged + kM * kK, dextents<int32_t, 2>(kK, mistake == kWrongSize ? kN / 2 : kN));
    if ((mistake != kOneSimdgroup || simdgroup == 0) && (mistake != kOneLane || lane == 0))
      product.run(left, right, sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  tensor<device float, dextents<int32_t, 2>, tensor_inline> target(c, dextents<int32_t, 2>(kN, kM));
  sum.store(target);
}

#define INSTANTIATE(name, m, n, simdgroups, mistake)                             \
  template [[host_name(#name)]] kernel void multiply<m, n, simdgroups, mistake>( \
      device const half*, device const half*, device float*, constant uint&, ushort, ushort, ushort);
INSTANTIATE(square, 32, 32, 4, kNone)
INSTANTIATE(wide, 16, 64, 2, kNone)
INSTANTIATE(unwritten_sum, 32, 32, 4, kUnwrittenSum)
INSTANTIATE(unwritten_store, 32, 32, 4, kUnwrittenStore)
INSTANTIATE(wrong_size, 32, 32, 4, kWrongSize)
INSTANTIATE(one_simdgroup, 32, 32, 4, kOneSimdgroup)
INSTANTIATE(one_lane, 32, 32, 4, kOneLane)
INSTANTIATE(no_barrier, 32, 32, 4, kNoBarrier)
