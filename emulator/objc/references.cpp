// Object lifetime: allocation, retain counts, autorelease pools, and the entry points that ARC calls.
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "abi.h"

using namespace metal_emulator::objc;

extern "C" {
extern Class constant_string_class asm("._OBJC_CLASS_NSConstantString");
void* _Block_copy(const void* block);
void _Block_release(const void* block);
Object* objc_retain(Object* object);
}

namespace metal_emulator::objc {
namespace {

// Number of live objects per class. Never destroyed.
struct Census {
  std::mutex mutex;
  std::map<Class*, long> counts;
  long total = 0;

  static Census& get() {
    static auto* instance = new Census;
    return *instance;
  }
  void add(Class* cls, long change) {
    std::lock_guard lock(mutex);
    counts[cls] += change;
    total += change;
  }
};

thread_local std::vector<Object*> autorelease_stack;
// The object that a method has just autoreleased as its return value. A caller that keeps it takes the
// reference from the top of the stack instead of retaining the object again.
thread_local Object* just_returned = nullptr;

// Takes over the reference that the callee put into the pool. Returns whether there was one.
bool take_returned(Object* object) {
  const bool taken = object && just_returned == object && autorelease_stack.back() == object;
  if (taken) autorelease_stack.pop_back();
  just_returned = nullptr;
  return taken;
}

// Literals and classes are never freed.
bool is_immortal(Object* object) {
  return !object || is_tagged(object) || object->isa == &constant_string_class ||
         (object->isa->info & kMetaClass);
}

// Drops a reference. Returns whether it was the last one, so that the object must be deallocated.
bool drop_reference(Object* object) {
  return header(object).references.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

template <typename Result = void>
Result send(Object* object, const char* name) {
  Selector selector{name, ""};
  const auto implementation = find_method(class_of(object), name)->implementation;
  return reinterpret_cast<Result (*)(Object*, Selector*)>(implementation)(object, &selector);
}

}  // namespace

long live_objects() {
  std::lock_guard lock(Census::get().mutex);
  return Census::get().total;
}

std::map<std::string, long> live_objects_by_class() {
  std::lock_guard lock(Census::get().mutex);
  std::map<std::string, long> counts;
  for (const auto& [cls, count] : Census::get().counts) {
    if (count > 0) counts[cls->name] = count;
  }
  return counts;
}

}  // namespace metal_emulator::objc

extern "C" {

Object* metal_emulator_allocate(Class* cls) {
  void* memory = std::calloc(1, sizeof(Header) + static_cast<std::size_t>(cls->instance_size));
  if (!memory) throw std::bad_alloc();
  auto* h = new (memory) Header{1};
  auto* object = reinterpret_cast<Object*>(h + 1);
  object->isa = cls;
  Census::get().add(cls, 1);
  construct_ivars(object);
  return object;
}

void metal_emulator_deallocate(Object* object) {
  destroy_ivars(object);
  Census::get().add(object->isa, -1);
  std::free(&header(object));
}

// Retains an object that another thread may be releasing. Returns false if its last reference is gone.
bool metal_emulator_retain_if_alive(Object* object) {
  auto& references = header(object).references;
  long count = references.load(std::memory_order_relaxed);
  while (count > 0 && !references.compare_exchange_weak(count, count + 1, std::memory_order_acq_rel)) {
  }
  return count > 0;
}

Object* objc_retain(Object* object) {
  if (!object || is_tagged(object)) return object;
  if (is_block(object)) return static_cast<Object*>(_Block_copy(object));
  if (!is_immortal(object)) header(object).references.fetch_add(1, std::memory_order_relaxed);
  return object;
}

void objc_release(Object* object) {
  if (!object || is_tagged(object)) return;
  if (is_block(object)) return _Block_release(object);
  if (is_immortal(object) || !drop_reference(object)) return;
  static const char* const name = intern("dealloc");
  send(object, name);
}

void* objc_autoreleasePoolPush() {
  just_returned = nullptr;
  return reinterpret_cast<void*>(autorelease_stack.size());
}

void objc_autoreleasePoolPop(void* pool) {
  const auto size = reinterpret_cast<std::size_t>(pool);
  just_returned = nullptr;
  while (autorelease_stack.size() > size) {  // releasing may autorelease more objects
    Object* object = autorelease_stack.back();
    autorelease_stack.pop_back();
    objc_release(object);
  }
  just_returned = nullptr;
}

Object* objc_autorelease(Object* object) {
  just_returned = nullptr;
  if (object && !is_tagged(object)) autorelease_stack.push_back(object);
  return object;
}

Object* objc_autoreleaseReturnValue(Object* object) {
  objc_autorelease(object);
  just_returned = is_tagged(object) ? nullptr : object;
  return object;
}
Object* objc_retainAutorelease(Object* object) {
  return objc_autorelease(objc_retain(object));
}
Object* objc_retainAutoreleaseReturnValue(Object* object) {
  return objc_autoreleaseReturnValue(objc_retain(object));
}
Object* objc_retainAutoreleasedReturnValue(Object* object) {
  return take_returned(object) ? object : objc_retain(object);
}
Object* objc_retainBlock(Object* block) {
  return static_cast<Object*>(_Block_copy(block));
}

void objc_storeStrong(Object** location, Object* value) {
  objc_retain(value);
  Object* old = *location;
  *location = value;
  objc_release(old);
}

// Synthesized properties. Atomic object properties share one lock, as they are rare and their sections short.

static std::recursive_mutex& property_mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

static Object** property(Object* object, std::ptrdiff_t offset) {
  return reinterpret_cast<Object**>(reinterpret_cast<char*>(object) + offset);
}

// Only atomic `copy` properties are set here: the emulator's others are `nonatomic`, and ARC stores them.
void objc_setProperty_atomic_copy(Object* object, Selector*, Object* value, std::ptrdiff_t offset) {
  static const char* const name = intern("copy");
  if (value) value = send<Object*>(value, name);
  Object* old;
  {
    std::lock_guard lock(property_mutex());
    old = std::exchange(*property(object, offset), value);
  }
  objc_release(old);
}

Object* objc_getProperty(Object* object, Selector*, std::ptrdiff_t offset, bool atomic) {
  if (!atomic) return *property(object, offset);
  std::lock_guard lock(property_mutex());
  return objc_retainAutorelease(*property(object, offset));
}
void objc_setProperty_nonatomic_copy(Object* object, Selector* selector, Object* value,
                                     std::ptrdiff_t offset) {
  objc_setProperty_atomic_copy(object, selector, value, offset);
}

}  // extern "C"
