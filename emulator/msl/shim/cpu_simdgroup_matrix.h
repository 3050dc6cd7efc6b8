// Matrix products on fibers. A lane adds its elements to the queue of its simdgroup and continues. The queued
// products are computed for all lanes together before a lane reads a result or waits for anything else, so a loop
// of products needs no switches between lanes.
#pragma once

namespace msl {

using abi::MatrixProduct;
using abi::MatrixQueue;

// Index of the first or second element of a lane among the 64 elements in row-major order, in the layout that the
// executor's options select.
MSL_INLINE int fragment_place(int lane, int element) {
  return abi::current_worker().matrix_places[lane][element];
}

// Relaxed atomic access, as for all data that lanes share: see cpu_simdgroup.h.
template <class T>
MSL_INLINE void share(T& place, T value) {
  __atomic_store(&place, &value, __ATOMIC_RELAXED);
}
template <class T>
MSL_INLINE T shared(const T& place) {
  T value;
  __atomic_load(&place, &value, __ATOMIC_RELAXED);
  return value;
}

MSL_INLINE Simdgroup& current_simdgroup() {
  return *abi::current_fiber().simdgroup;
}

// When all lanes have arrived, the queue is empty, as the executor runs it before any operation.
struct AwaitProducts {
  static int execute(Simdgroup&, Lanes) { return kOk; }
  static constexpr Operation operation{"simdgroup_matrix result", &execute};
};
__attribute__((noinline)) inline void await_products(Place place) {
  abi::Worker& worker = abi::current_worker();
  worker.arrive(worker, abi::current_fiber(), AwaitProducts::operation, place);
}

// Two elements of a matrix, or a queued product's promise to write them. `MatrixQueue::run` relies on the
// layout: elements at 0, pending at 8.
template <class T>
class Fragment {
 public:
  typedef ::vec<T, 2> Pair;

  Fragment() = default;
  MSL_INLINE Fragment(const Fragment& other) : elements_(other.get()) {}
  MSL_INLINE Fragment& operator=(const Fragment& other) {
    set(other.get());
    return *this;
  }
  MSL_INLINE ~Fragment() { detach(); }

  MSL_INLINE void set(Pair elements) {
    detach();
    elements_ = elements;
  }
  MSL_INLINE Pair get() const {
    if (pending_) settle();
    return elements_;
  }
  // The kernel may keep this reference, so each later product is computed immediately.
  MSL_INLINE Pair& reference() {
    if (pending_) settle();
    watched_ = true;
    return elements_;
  }
  MSL_INLINE uint pending() const { return pending_; }
  MSL_INLINE bool watched() const { return watched_; }
  // Registers these elements as the destination of the product with this number.
  MSL_INLINE void promise(MatrixProduct& product, int lane, uint number) {
    detach();
    share(product.targets[lane], static_cast<void*>(this));
    pending_ = number + 1;
  }

 private:
  void settle() const {
    const MatrixProduct& product = current_simdgroup().queue->products[pending_ - 1];
    await_products({shared(product.file), shared(product.line)});
  }
  MSL_INLINE void detach() {
    if (pending_)
      share(current_simdgroup().queue->products[pending_ - 1].targets[lane()], static_cast<void*>(nullptr));
    pending_ = 0;
  }

  alignas(8) Pair elements_;
  alignas(8) uint pending_ = 0;  // 1 + index of the product; 0: the elements are valid
  bool watched_ = false;
};
struct FragmentLayout {
  char elements[8];
  uint pending;
};
static_assert(__builtin_offsetof(FragmentLayout, pending) == 8,
              "pending follows eight bytes of elements");

typedef float Row __attribute__((vector_size(32)));

// Writes a result to the lanes that still wait for it.
MSL_INLINE void deliver(MatrixProduct& p) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!p.targets[lane]) continue;
    ::float2 elements{p.c[fragment_place(lane, 0)], p.c[fragment_place(lane, 1)]};
    FragmentLayout& target = *static_cast<FragmentLayout*>(p.targets[lane]);
    __builtin_memcpy(target.elements, &elements, sizeof elements);
    target.pending = 0;
  }
}

MSL_EXECUTE run_products(MatrixQueue& queue) {
  for (uint n = 0; n < MatrixQueue::kCapacity && queue.products[n].lanes; ++n) {
    MatrixProduct& p = queue.products[n];
    if (p.lanes != ~0u || p.differs) return static_cast<int>(n);
    const Row* b = reinterpret_cast<const Row*>(p.b);
    Row* result = reinterpret_cast<Row*>(p.c);
    const Row* addend = p.addend >= 0 ? reinterpret_cast<const Row*>(queue.products[p.addend].c) : result;
    Row sums[8];
    for (int i = 0; i < 8; ++i) sums[i] = addend[i];
    for (int k = 0; k < 8; ++k) {
      for (int i = 0; i < 8; ++i) sums[i] += p.a[i * 8 + k] * b[k];
    }
    for (int i = 0; i < 8; ++i) result[i] = sums[i];
    deliver(p);
    p.lanes = 0;
  }
  for (auto& count : queue.count) count = 0;
  return kOk;
}

template <class T>
MSL_INLINE void put_pair(float* matrix, int lane, ::vec<T, 2> elements) {
  for (int i = 0; i < 2; ++i) share(matrix[fragment_place(lane, i)], static_cast<float>(elements[i]));
}

// d = a b + c.
template <class A, class B>
MSL_INLINE void multiply(Fragment<float>& d, const Fragment<A>& a, const Fragment<B>& b,
                         const Fragment<float>& c, Place place) {
  const abi::Fiber& fiber = abi::current_fiber();
  const int lane = static_cast<int>(fiber.lane);
  MatrixQueue& queue = *fiber.simdgroup->queue;
  const ::vec<A, 2> left = a.get();
  const ::vec<B, 2> right = b.get();
  if (shared(queue.count[lane]) == MatrixQueue::kCapacity) await_products(place);
  const uint number = shared(queue.count[lane]);
  MatrixProduct& product = queue.products[number];
  put_pair<A>(product.a, lane, left);
  put_pair<B>(product.b, lane, right);
  const int addend = static_cast<int>(c.pending()) - 1;
  if (addend < 0) put_pair<float>(product.c, lane, c.get());
  const Lanes asked = shared(product.lanes);
  if (asked == 0) {
    share(product.addend, addend);
    share(product.line, place.line);
    share(product.file, place.file);
    share(product.differs, abi::u8{0});
    share(queue.run, &run_products);
  } else if (shared(product.line) != place.line || shared(product.addend) != addend) {
    share(product.differs, abi::u8{1});
  }
  share(product.lanes, asked | 1u << lane);
  d.promise(product, lane, number);
  share(queue.count[lane], static_cast<abi::u8>(number + 1));
  if (d.watched()) await_products(place);
}

}  // namespace msl
