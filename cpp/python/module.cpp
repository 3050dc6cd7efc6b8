// The module metal_prefill._core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "../base/long_wait.h"
#include "../engine/engine.h"
#include "../engine/session_lock.h"
#include "../model/quants.h"
#include "arrays.h"
#include "bindings.h"
#ifdef METAL_PREFILL_EMULATOR
#include "../../emulator/python.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Engine threads have no Python state. Once the interpreter has ended, no other thread needs the GIL.
void wait_without_gil(const std::function<void()>& wait) {
  using namespace metal_prefill;
  if (Py_IsInitialized() && PyGILState_GetThisThreadState() && !gil_is_released &&
      !interpreter_exits_elsewhere())
    without_gil(wait);
  else
    wait();
}

nb::python_error os_error() {
  PyErr_SetFromErrno(PyExc_OSError);
  return nb::python_error();
}

// Python's mmap on macOS would first flush the disk's write cache.
nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>> map_file(int descriptor, std::size_t bytes) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) throw os_error();
  if (std::size_t(status.st_size) < bytes)
    throw std::invalid_argument("the file has " + std::to_string(status.st_size) + " bytes, not " +
                                std::to_string(bytes));
  void* memory = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) throw os_error();
  const auto unmap = [bytes](void* p) { munmap(p, bytes); };
  using Mapping = std::unique_ptr<void, decltype(unmap)>;
  const nb::capsule owner(new Mapping(memory, unmap),
                          [](void* p) noexcept { delete static_cast<Mapping*>(p); });
  return {memory, {bytes}, owner};
}

}  // namespace

NB_MODULE(_core, m) {
  using namespace metal_prefill::python;
  using namespace metal_prefill;
  m.doc() = "Native engines of metal_prefill.";
  nb::register_exception_translator(translate);
  raise_if_interrupted = [] {
    with_gil([] {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    });
  };
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
  bind_machine(m);
  m.attr("compiler") = __VERSION__;
  m.def("metal_device", &metal_device, nb::call_guard<nb::gil_scoped_release>(),
        "Facts about the GPU; only `problem` if device 'metal' cannot be used.");
  nb::class_<CompiledSource>(m, "CompiledSource", "A source of the shaders, compiled from its text.")
      .def_ro("name", &CompiledSource::name)
      .def_ro("problem", &CompiledSource::problem, "The compiler's message; empty if the source compiles.")
      .def_ro("seconds", &CompiledSource::seconds)
      .def_ro("needs_tensors", &CompiledSource::needs_tensors, "It may be too new for the system.");
  m.def("compile_shaders", &compile_shaders, nb::call_guard<GilRelease>(),
        "Compile each source of the shaders, one by one, with all kernels.");
  m.def(
      "metal_available", [] { return !metal_device().contains("problem"); },
      nb::call_guard<nb::gil_scoped_release>(),
      "Whether device 'metal' can be used: a Mac's GPU, or the emulator.");
  m.def("map_file", &map_file, "descriptor"_a, "bytes"_a, "Map the first bytes of a file, read-only.");
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
      "Skip whole strings of a GGUF file: their number, and the position after them.");
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
