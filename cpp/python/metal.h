// Bindings for recorded passes of the Metal engine, in every build.
#pragma once

#include <nanobind/nanobind.h>

namespace metal_prefill::metal {

void bind_recordings(nanobind::module_& m);

}  // namespace metal_prefill::metal
