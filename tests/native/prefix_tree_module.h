#pragma once

#include <nanobind/nanobind.h>

namespace metal_prefill {

// Adds a prefix tree over pages without contents.
void bind_prefix_tree(nanobind::module_& m);

}  // namespace metal_prefill
