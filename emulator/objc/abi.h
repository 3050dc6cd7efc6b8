// Data structures of clang for -fobjc-runtime=gnustep-2.0, and the few runtime calls of the emulator's own
// code. Contains only what the compiler emits, which determines the layout.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>

namespace metal_emulator::objc {

struct Class;

struct Object {
  Class* isa;
};

using Implementation = void (*)();

struct Selector {
  const char* name;  // unique once loaded: two selectors are equal if their names are the same pointer
  const char* types;
};

struct Method {
  Implementation implementation;
  Selector* selector;
  const char* types;
};

struct MethodList {
  MethodList* next;
  int count;
  std::size_t element_size;
  Method methods[];
};

struct Ivar {
  const char* name;
  const char* type;
  int* offset;
  std::uint32_t size;
  std::uint32_t flags;  // bits 3 and up: log2 of the alignment
};

struct IvarList {
  int count;
  std::size_t element_size;
  Ivar ivars[];
};

// The result of objc_msg_lookup_sender; compiled code reads `implementation`.
struct Slot {
  Class* owner;
  Class* cached_for;
  const char* types;
  int version;
  Implementation implementation;
};

using DispatchTable = std::unordered_map<const char*, Slot>;  // by unique selector name

inline constexpr unsigned long kMetaClass = 1;  // in Class::info

struct Class {
  Class* isa;
  Class* superclass;
  const char* name;
  long version;
  unsigned long info;
  long instance_size;  // before the class is loaded: negative, without the superclass's part
  IvarList* ivars;
  MethodList* methods;
  DispatchTable* dispatch_table;  // null before the class is loaded
  Implementation cxx_construct, cxx_destruct;
  Class *first_subclass, *next_sibling;
  void* protocols;
  void* extra_data;
  long abi_version;
  void* properties;
};

struct Category {
  const char* name;
  void* contents[6];
};

// One per linked image: the bounds of its sections with Objective-C data.
struct Image {
  std::uint64_t version;
  Selector *selectors, *selectors_end;
  Class **classes, **classes_end;
  Class **class_references, **class_references_end;
  Category *categories, *categories_end;
};

struct Super {
  Object* receiver;
  Class* superclass;
};

struct alignas(16) Header {  // precedes every object
  std::atomic<long> references;
};

// Small strings and numbers are encoded in the pointer itself.
inline bool is_tagged(const void* object) {
  return (reinterpret_cast<std::uintptr_t>(object) & 7) != 0;
}
inline Header& header(Object* object) {
  return reinterpret_cast<Header*>(object)[-1];
}

bool is_block(Object* object);
Class* class_of(Object* object);
Slot* find_method(Class* cls, const char* unique_name);
// Run `.cxx_construct` (superclass first) or `.cxx_destruct` (subclass first) of all classes of the object.
void construct_ivars(Object* object);
void destroy_ivars(Object* object);
// Returns the unique copy of a string, which lives as long as the process: a selector's unique name.
const char* intern(const std::string& text);
long live_objects();
std::map<std::string, long> live_objects_by_class();

}  // namespace metal_emulator::objc

extern "C" {
// Used by classes that are written without ARC.
metal_emulator::objc::Object* metal_emulator_allocate(metal_emulator::objc::Class* cls);
void metal_emulator_deallocate(metal_emulator::objc::Object* object);
}
