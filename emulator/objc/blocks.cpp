// Blocks: copies closures to the heap, following the ABI that clang documents (Block-ABI-Apple). __block
// variables are not supported: a program that uses one does not link.
#include <cstdlib>
#include <cstring>
#include <new>

#include "abi.h"

using namespace metal_emulator::objc;

namespace {

enum : int {
  kReferenceMask = 0xffff,  // counted in steps of 2
  kOnHeap = 1 << 24,
  kHasCopyAndDispose = 1 << 25,
  kGlobal = 1 << 28,
};

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

// Drops a reference. Returns whether it was the last one.
bool drop(std::atomic<int>& flags) {
  return ((flags.fetch_sub(2) - 2) & kReferenceMask) == 0;
}

}  // namespace

extern "C" {

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
  auto* heap = static_cast<Block*>(std::malloc(block->descriptor->size));
  if (!heap) throw std::bad_alloc();
  std::memcpy(static_cast<void*>(heap), block,
              block->descriptor->size);  // captured values follow the fixed part
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

}  // extern "C"

bool metal_emulator::objc::is_block(Object* object) {
  void* isa = object->isa;
  return isa == _NSConcreteStackBlock || isa == _NSConcreteMallocBlock || isa == _NSConcreteGlobalBlock;
}
