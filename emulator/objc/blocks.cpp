// Blocks: copying closures to the heap, after the ABI that clang documents (Block-ABI-Apple).
#include <cstdlib>
#include <cstring>
#include <new>

#include "abi.h"

using metal_emulator::objc::Object;

namespace {

enum : int {
  kReferenceMask = 0xffff,  // counted in steps of 2
  kOnHeap = 1 << 24,
  kHasCopyAndDispose = 1 << 25,
  kGlobal = 1 << 28,
};
enum : int { kFieldIsBlock = 7, kFieldIsByRef = 8, kByRefCaller = 128 };

struct Descriptor {
  unsigned long reserved, size;
  void (*copy)(void* to, const void* from);
  void (*dispose)(const void* block);
};

struct Block {
  void* isa;
  std::atomic<int> flags;
  int reserved;
  void* invoke;
  Descriptor* descriptor;
};

// A __block variable.
struct ByRef {
  void* isa;
  ByRef* forwarding;  // the heap copy once there is one
  std::atomic<int> flags;
  int size;
  void (*keep)(void* to, void* from);
  void (*destroy)(void* variable);
};

// Bitwise copy of a struct with atomics in it; captured values follow the fixed part.
template <typename T>
T* copy_bytes(const T* from, std::size_t size) {
  void* memory = std::malloc(size);
  if (!memory) throw std::bad_alloc();
  std::memcpy(memory, static_cast<const void*>(from), size);
  return static_cast<T*>(memory);
}

// True when the last reference went.
bool drop(std::atomic<int>& flags) {
  return ((flags.fetch_sub(2) - 2) & kReferenceMask) == 0;
}

ByRef* retain_by_ref(ByRef* variable) {
  variable = variable->forwarding;
  if (variable->flags & kOnHeap) {
    variable->flags += 2;
    return variable;
  }
  ByRef* heap = copy_bytes(variable, static_cast<std::size_t>(variable->size));
  // One reference is the block's, one the stack frame's that still holds the variable.
  heap->flags = (variable->flags & ~kReferenceMask) | kOnHeap | 4;
  heap->forwarding = heap;
  variable->forwarding = heap;
  if (heap->flags & kHasCopyAndDispose) heap->keep(heap, variable);
  return heap;
}

void release_by_ref(ByRef* variable) {
  variable = variable->forwarding;
  if (!(variable->flags & kOnHeap) || !drop(variable->flags)) return;
  if (variable->flags & kHasCopyAndDispose) variable->destroy(variable);
  std::free(static_cast<void*>(variable));
}

}  // namespace

extern "C" {

Object* objc_retain(Object* object);
void objc_release(Object* object);

void* _NSConcreteStackBlock[32];
void* _NSConcreteMallocBlock[32];
void* _NSConcreteGlobalBlock[32];

void* _Block_copy(const void* source) {
  if (!source) return nullptr;
  auto* block = const_cast<Block*>(static_cast<const Block*>(source));
  if (block->flags & kGlobal) return block;
  if (block->flags & kOnHeap) {
    block->flags += 2;
    return block;
  }
  Block* heap = copy_bytes(block, block->descriptor->size);
  heap->flags = (block->flags & ~kReferenceMask) | kOnHeap | 2;
  heap->isa = _NSConcreteMallocBlock;
  if (heap->flags & kHasCopyAndDispose) heap->descriptor->copy(heap, block);
  return heap;
}

void _Block_release(const void* source) {
  auto* block = const_cast<Block*>(static_cast<const Block*>(source));
  if (!block || !(block->flags & kOnHeap) || !drop(block->flags)) return;
  if (block->flags & kHasCopyAndDispose) block->descriptor->dispose(block);
  std::free(static_cast<void*>(block));
}

void _Block_object_assign(void* to, const void* object, int flags) {
  auto* destination = static_cast<const void**>(to);
  if (flags & kByRefCaller) {
    *destination = object;  // the variable's own storage, not retained (ARC does it in `keep`)
  } else if (flags & kFieldIsByRef) {
    *destination = retain_by_ref(static_cast<ByRef*>(const_cast<void*>(object)));
  } else if ((flags & kFieldIsBlock) == kFieldIsBlock) {
    *destination = _Block_copy(object);
  } else {
    *destination = objc_retain(static_cast<Object*>(const_cast<void*>(object)));
  }
}

void _Block_object_dispose(const void* object, int flags) {
  if (flags & kByRefCaller) return;
  if (flags & kFieldIsByRef) {
    release_by_ref(static_cast<ByRef*>(const_cast<void*>(object)));
  } else if ((flags & kFieldIsBlock) == kFieldIsBlock) {
    _Block_release(object);
  } else {
    objc_release(static_cast<Object*>(const_cast<void*>(object)));
  }
}

}  // extern "C"

bool metal_emulator::objc::is_block(Object* object) {
  void* isa = object->isa;
  return isa == _NSConcreteStackBlock || isa == _NSConcreteMallocBlock || isa == _NSConcreteGlobalBlock;
}
