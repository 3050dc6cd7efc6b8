// Names, types and offsets of the fields of shaders/args_fields.h, to decode recorded arguments.
#pragma once

#include <cstddef>
#include <span>

#include "../../../shaders/args.h"

namespace metal_prefill::metal {

struct ArgsField {
  const char* name;
  const char* type;  // u32_t, u64_t, float, or the name of another struct
  std::size_t offset, count;
};

struct ArgsLayout {
  const char* name;
  std::size_t bytes;
  std::span<const ArgsField> fields;
};

template <typename Args>
struct ArgsTable;

// clang-format off
#define ARGS_STRUCT(struct_name)               \
  template <>                                  \
  struct ArgsTable<struct_name> {              \
    using Struct = struct_name;                \
    static constexpr ArgsField kFields[] = {
#define ARGS_FIELD(type, name) {#name, #type, offsetof(Struct, name), 1},
#define ARGS_ARRAY(type, name, count) {#name, #type, offsetof(Struct, name), count},
#define ARGS_END(struct_name, bytes)                                        \
    };                                                                      \
    static constexpr ArgsLayout kLayout = {#struct_name, bytes, kFields};   \
  };
// clang-format on
#include "../../../shaders/args_fields.h"
#undef ARGS_STRUCT
#undef ARGS_FIELD
#undef ARGS_ARRAY
#undef ARGS_END

inline constexpr const ArgsLayout* kArgsLayouts[] = {
#define ARGS_STRUCT(struct_name) &ArgsTable<struct_name>::kLayout,
#define ARGS_FIELD(type, name)
#define ARGS_ARRAY(type, name, count)
#define ARGS_END(struct_name, bytes)
#include "../../../shaders/args_fields.h"
#undef ARGS_STRUCT
#undef ARGS_FIELD
#undef ARGS_ARRAY
#undef ARGS_END
};

}  // namespace metal_prefill::metal
