// The module metal_prefill._core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

#include "../base/long_wait.h"
#include "../engine/engine.h"
#include "../engine/session_lock.h"
#include "../model/file_mapping.h"
#include "../model/quants.h"
#include "arrays.h"
#include "bindings.h"
#ifdef METAL_PREFILL_EMULATOR
#include "../../emulator/python.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Throws if the user has interrupted the program.
void check_signals() {
  metal_prefill::with_gil([] {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  });
}

// Engine threads have no Python state. Once the interpreter has ended, no other thread needs the GIL.
void wait_without_gil(const std::function<void()>& wait) {
  if (Py_IsInitialized() && PyGILState_GetThisThreadState() && !metal_prefill::gil_is_released)
    metal_prefill::without_gil(wait);
  else
    wait();
}

}  // namespace

NB_MODULE(_core, m) {
  using namespace metal_prefill::python;
  using namespace metal_prefill;
  m.doc() = "Native engines of metal_prefill.";
  nb::register_exception_translator(translate);
  raise_if_interrupted = check_signals;
  long_wait = wait_without_gil;
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
    interpreter_exits();
    // Objects that other threads hold at exit are not leaks.
    if (nb::cast<int>(nb::module_::import_("threading").attr("active_count")()) > 1)
      nb::set_leak_warnings(false);
  }));
  // Only developers of this package need a list of the objects that are alive at exit.
  if (std::getenv("METAL_PREFILL_LEAK_WARNINGS") == nullptr) nb::set_leak_warnings(false);
  bind_model(m);
  bind_sampling(m);
  bind_engines(m);
  bind_texts(m);
  bind_recordings(m);
  bind_sessions(m);
  nb::module_ machine = m.def_submodule("cpu", "What the processor can do: its kernel sets.");
  bind_machine(machine);
  m.attr("compiler") = __VERSION__;
  m.def("metal_device", &metal_device, nb::call_guard<nb::gil_scoped_release>(),
        "Facts about the GPU; only `problem` where device 'metal' cannot be used.");
  nb::class_<CompiledSource>(m, "CompiledSource", "A source of the shaders, compiled from its text.")
      .def_ro("name", &CompiledSource::name)
      .def_ro("problem", &CompiledSource::problem, "What the compiler says; empty: it compiles.")
      .def_ro("seconds", &CompiledSource::seconds)
      .def_ro("needs_tensors", &CompiledSource::needs_tensors, "It may be too new for the system.");
  m.def("compile_shaders", &compile_shaders, nb::call_guard<GilRelease>(),
        "Compile each source of the shaders, one by one, with all kernels.");
  m.def(
      "metal_available", [] { return !metal_device().contains("problem"); },
      nb::call_guard<nb::gil_scoped_release>(),
      "Whether device 'metal' can be used: a Mac's GPU, or the emulator.");
  m.def(
      "map_file",
      [](int descriptor, std::size_t bytes) -> nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>> {
        FileMapping* mapping = nullptr;
        try {
          mapping = new FileMapping(descriptor, bytes);
        } catch (const std::system_error& error) {
          errno = error.code().value();
          PyErr_SetFromErrno(PyExc_OSError);
          throw nb::python_error();
        }
        const nb::capsule owner(mapping, [](void* p) noexcept { delete static_cast<FileMapping*>(p); });
        return {reinterpret_cast<const std::uint8_t*>(mapping->data()), {bytes}, owner};
      },
      "descriptor"_a, "bytes"_a, "Map the first bytes of a file, read-only.");
  m.def(
      "skip_strings",
      [](const metal_prefill::python::ByteArray& data, std::size_t position, std::size_t count) {
        const std::size_t size = data.shape(0);
        std::size_t index = 0;
        for (std::uint64_t length = 0; index < count && position <= size && size - position >= sizeof length;
             ++index, position += sizeof length + std::size_t(length)) {
          std::memcpy(&length, data.data() + position, sizeof length);
          if (length > size - position - sizeof length) break;
        }
        return std::pair(index, position);
      },
      "data"_a, "position"_a, "count"_a,
      "Step over strings of a GGUF file, as far as they are whole: how many are, and where the next begins.");
#ifdef METAL_PREFILL_EMULATOR
  m.attr("has_emulator") = true;
  nb::module_ emulator = m.def_submodule("emulator", "Introspection of the Metal emulator.");
  metal_emulator::bind_emulator(emulator);
#else
  m.attr("has_emulator") = false;
#endif
  m.def(
      "dequantize",
      [](std::uint32_t type, ByteArray rows, std::size_t values) {
        if (rows.shape(0) != row_bytes(TensorType(type), values))
          throw std::invalid_argument("a row of " + std::to_string(values) + " values needs " +
                                      std::to_string(row_bytes(TensorType(type), values)) + " bytes, got " +
                                      std::to_string(rows.shape(0)));
        FloatResult out(values);
        dequantize_row(TensorType(type), rows.data(), out.data(), values);
        return out.release();
      },
      "type"_a, "rows"_a, "values"_a, "Converts blocks of a GGUF tensor type to float32.");
}
