// Classes, selectors and message lookup.
#include <unwind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "abi.h"

using namespace metal_emulator::objc;

extern "C" {
extern Class tiny_string_class asm("._OBJC_CLASS_NSTinyString");
extern Class block_class asm("._OBJC_CLASS_NSBlock");
}

namespace metal_emulator::objc {
namespace {

// Methods found for messages, by class and unique name. None is ever removed.
using FoundMethods = std::map<std::pair<Class*, const char*>, Slot*>;

// Never destroyed, as objects may be released while the process exits.
struct Tables {
  std::shared_mutex mutex;
  FoundMethods found;
  std::unordered_set<std::string> names;
};

Tables& tables() {
  static auto* instance = new Tables;
  return *instance;
}

const char* intern_locked(const std::string& text) {
  return tables().names.insert(text).first->c_str();
}

void add_methods(Class* cls, const MethodList* list) {
  for (; list; list = list->next) {
    for (int i = 0; i < list->count; i++) {
      const Method& method = list->methods[i];
      (*cls->dispatch_table)[intern_locked(method.selector->name)] =
          Slot{cls, cls, method.types, 0, method.implementation};
    }
  }
}

long align_up(long value, long alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Places ivars after those of the superclass, whose size is known only now.
void lay_out_ivars(Class* cls) {
  const long own = cls->instance_size < 0 ? -cls->instance_size : cls->instance_size;
  long base = cls->superclass ? cls->superclass->instance_size : 0;
  if (cls->ivars) {
    long alignment = 1;
    for (int i = 0; i < cls->ivars->count; i++) {
      alignment = std::max(alignment, 1L << (cls->ivars->ivars[i].flags >> 3));
    }
    base = align_up(base, alignment);
    for (int i = 0; i < cls->ivars->count; i++) *cls->ivars->ivars[i].offset += static_cast<int>(base);
  }
  cls->instance_size = base + own;
}

void load_class(Class* cls) {
  if (cls->dispatch_table) return;
  if (cls->superclass) load_class(cls->superclass);
  Class* root = cls;
  while (root->superclass) root = root->superclass;
  Class* meta = cls->isa;
  cls->dispatch_table = new DispatchTable;
  meta->dispatch_table = new DispatchTable;
  meta->isa = root->isa;
  meta->superclass = cls->superclass ? cls->superclass->isa : cls;
  meta->instance_size = sizeof(Class);
  lay_out_ivars(cls);
  add_methods(cls, cls->methods);
  add_methods(meta, meta->methods);
}

void run_on_ivars(Class* cls, Object* object, const char* name, bool superclass_first) {
  if (!cls) return;
  if (superclass_first) run_on_ivars(cls->superclass, object, name, superclass_first);
  Implementation implementation = nullptr;
  {
    std::shared_lock lock(tables().mutex);
    if (auto found = cls->dispatch_table->find(name); found != cls->dispatch_table->end()) {
      implementation = found->second.implementation;
    }
  }
  if (implementation) {
    Selector selector{name, "v16@0:8"};
    reinterpret_cast<void (*)(Object*, Selector*)>(implementation)(object, &selector);
  }
  if (!superclass_first) run_on_ivars(cls->superclass, object, name, superclass_first);
}

// Cache of recently found methods, by class and selector.
constexpr std::size_t kCachedMethods = 1024;
std::array<std::atomic<const FoundMethods::value_type*>, kCachedMethods> method_cache;

std::atomic<const FoundMethods::value_type*>& cached_method(Class* cls, const char* name) {
  const auto hash = reinterpret_cast<std::uintptr_t>(cls) / 8 + reinterpret_cast<std::uintptr_t>(name);
  return method_cache[(hash ^ hash >> 10) % kCachedMethods];
}

Slot* find_locked(Class* cls, const char* unique_name) {
  for (; cls; cls = cls->superclass) {
    if (auto found = cls->dispatch_table->find(unique_name); found != cls->dispatch_table->end()) {
      return &found->second;
    }
  }
  return nullptr;
}

Slot* find_and_remember(Class* cls, const Selector* selector) {
  std::unique_lock lock(tables().mutex);
  Slot* slot = find_locked(cls, selector->name);
  if (!slot) {
    throw std::logic_error(std::string("unrecognized selector: ") + (cls->info & kMetaClass ? "+[" : "-[") +
                           cls->name + " " + selector->name + "]");
  }
  const auto found = tables().found.try_emplace({cls, selector->name}, slot).first;
  cached_method(cls, selector->name).store(&*found, std::memory_order_release);
  return slot;
}

// Null if the method is not cached.
Slot* find_remembered(Class* cls, const Selector* selector) {
  const auto* found = cached_method(cls, selector->name).load(std::memory_order_acquire);
  return found && found->first == std::pair(cls, selector->name) ? found->second : nullptr;
}

Slot* require_method(Class* cls, const Selector* selector) {
  Slot* slot = find_remembered(cls, selector);
  return slot ? slot : find_and_remember(cls, selector);
}

// Handles every message to nil. Compiled code clears results that are not in a register.
std::uintptr_t nil_method() {
  return 0;
}
Slot nil_slot{nullptr, nullptr, "", 0, reinterpret_cast<Implementation>(nil_method)};

}  // namespace

const char* intern(const std::string& text) {
  std::unique_lock lock(tables().mutex);
  return intern_locked(text);
}

Class* class_of(Object* object) {
  if (is_tagged(object)) return &tiny_string_class;
  return is_block(object) ? &block_class : object->isa;
}

Slot* find_method(Class* cls, const char* unique_name) {
  std::shared_lock lock(tables().mutex);
  return find_locked(cls, unique_name);
}

void construct_ivars(Object* object) {
  static const char* const name = intern(".cxx_construct");
  run_on_ivars(object->isa, object, name, true);
}

void destroy_ivars(Object* object) {
  static const char* const name = intern(".cxx_destruct");
  run_on_ivars(object->isa, object, name, false);
}

}  // namespace metal_emulator::objc

extern "C" {

// Called by a constructor function in every image that contains Objective-C.
void __objc_load(Image* image) {
  std::unique_lock lock(tables().mutex);
  for (Selector* s = image->selectors; s < image->selectors_end; s++) {
    if (s->name) s->name = intern_locked(s->name);
  }
  for (Class** c = image->classes; c < image->classes_end; c++) {
    if (*c) load_class(*c);
  }
  for (Category* c = image->categories; c < image->categories_end; c++) {
    if (c->name) throw std::logic_error(std::string("categories are not supported: ") + c->name);
  }
}

Slot* objc_msg_lookup_sender(Object** receiver, Selector* selector, Object*) {
  Object* object = *receiver;
  if (!object) return &nil_slot;
  if (!is_tagged(object)) {  // methods are cached by an object's true class, which excludes blocks
    if (Slot* slot = find_remembered(object->isa, selector)) return slot;
  }
  return require_method(class_of(object), selector);
}
Implementation objc_msg_lookup_super(Super* super, Selector* selector) {
  return (super->receiver ? require_method(super->superclass, selector) : &nil_slot)->implementation;
}

Class* object_getClass(Object* object) {
  return object ? class_of(object) : nullptr;
}
Class* class_getSuperclass(Class* cls) {
  return cls->superclass;
}
const char* class_getName(Class* cls) {
  return cls->name;
}
bool class_respondsToSelector(Class* cls, Selector* selector) {
  return find_method(cls, selector->name) != nullptr;
}

void objc_enumerationMutation(Object*) {
  throw std::logic_error("a collection was changed while it was enumerated");
}

// Only C++ exceptions occur here, so .mm files have C++ handlers and clean-ups.
_Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, std::uint64_t, _Unwind_Exception*,
                                         _Unwind_Context*);
_Unwind_Reason_Code __gnustep_objcxx_personality_v0(int version, _Unwind_Action actions,
                                                    std::uint64_t exception_class,
                                                    _Unwind_Exception* exception, _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, exception_class, exception, context);
}

}  // extern "C"
