// Python bindings of emulator.h, which documents them. Compiled into each extension that contains an
// emulator.
#include "python.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "emulator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_emulator {
namespace {

constexpr auto kWithoutGil = nb::call_guard<nb::gil_scoped_release>();

nb::tuple to_tuple(const Dim3& size) {
  return nb::make_tuple(size.x, size.y, size.z);
}

void bind_records(nb::module_& m) {
  nb::class_<BufferInfo>(m, "BufferInfo")
      .def_ro("label", &BufferInfo::label)
      .def_ro("length", &BufferInfo::length)
      .def_prop_ro("storage_mode",
                   [](const BufferInfo& info) {
                     return info.storage_mode == StorageMode::kPrivate ? "private" : "shared";
                   })
      .def_ro("no_copy", &BufferInfo::no_copy);
  nb::class_<Counters>(m, "Counters")
      .def_ro("buffers", &Counters::buffers)
      .def_ro("pipelines", &Counters::pipelines)
      .def_ro("compiled_pipelines", &Counters::compiled_pipelines)
      .def_ro("waits", &Counters::waits)
      .def_ro("archived_pipelines", &Counters::archived_pipelines)
      .def_ro("residency_fault_bytes", &Counters::residency_fault_bytes)
      .def_ro("residency_faults", &Counters::residency_faults)
      .def_ro("command_buffers", &Counters::command_buffers)
      .def_ro("dispatches", &Counters::dispatches);
  nb::class_<BindingRecord>(m, "BindingRecord")
      .def_ro("index", &BindingRecord::index)
      .def_ro("name", &BindingRecord::name)
      .def_ro("label", &BindingRecord::label)
      .def_ro("bytes_read", &BindingRecord::bytes_read)
      .def_ro("bytes_written", &BindingRecord::bytes_written)
      .def_ro("unique_bytes_read", &BindingRecord::unique_bytes_read)
      .def_ro("unique_bytes_written", &BindingRecord::unique_bytes_written);
  nb::class_<DispatchRecord>(m, "DispatchRecord")
      .def_ro("kernel", &DispatchRecord::kernel)
      .def_prop_ro("grid", [](const DispatchRecord& record) { return to_tuple(record.grid); })
      .def_prop_ro("group", [](const DispatchRecord& record) { return to_tuple(record.group); })
      .def_ro("threads", &DispatchRecord::threads)
      .def_ro("barriers", &DispatchRecord::barriers)
      .def_ro("seconds", &DispatchRecord::seconds)
      .def_ro("after_barrier", &DispatchRecord::after_barrier)
      .def_ro("bindings", &DispatchRecord::bindings);
  nb::class_<CommandBufferRecord>(m, "CommandBufferRecord")
      .def_ro("label", &CommandBufferRecord::label)
      .def_ro("error", &CommandBufferRecord::error)
      .def_ro("retained", &CommandBufferRecord::retained)
      .def_ro("ahead_of_host", &CommandBufferRecord::ahead_of_host)
      .def_ro("dispatches", &CommandBufferRecord::dispatches);
}

// The defaults, with the members that are given by name replaced.
template <typename T>
nb::object with_members(const nb::kwargs& members) {
  nb::object made = nb::cast(T());
  for (const auto [name, value] : members) nb::setattr(made, name, value);
  return made;
}

void bind_settings(nb::module_& m) {
  nb::enum_<MatrixLayout>(m, "MatrixLayout")
      .value("APPLE", MatrixLayout::kApple)
      .value("CONSECUTIVE", MatrixLayout::kConsecutive)
      .value("SHIFTED", MatrixLayout::kShifted)
      .value("COLUMNS", MatrixLayout::kColumns);
  nb::class_<ExecutorOptions>(m, "ExecutorOptions")
      .def_rw("workers", &ExecutorOptions::workers)
      .def_rw("seed", &ExecutorOptions::seed)
      .def_rw("checked", &ExecutorOptions::checked)
      .def_rw("fast_errors", &ExecutorOptions::fast_errors)
      .def_rw("matrix_layout", &ExecutorOptions::matrix_layout);
  m.def("Options", &with_members<ExecutorOptions>, nb::sig("def Options(**members) -> ExecutorOptions"));
  m.def("options", &options, kWithoutGil);
  m.def("set_options", &set_options, "options"_a, kWithoutGil);

  nb::class_<DeviceLimits>(m, "DeviceLimits")
      .def_rw("max_buffer_length", &DeviceLimits::max_buffer_length)
      .def_rw("working_set_bytes", &DeviceLimits::working_set_bytes)
      .def_rw("apple_family", &DeviceLimits::apple_family)
      .def_rw("name", &DeviceLimits::name)
      .def_rw("no_copy", &DeviceLimits::no_copy)
      .def_rw("simdgroup_matrix", &DeviceLimits::simdgroup_matrix)
      .def_rw("max_threads", &DeviceLimits::max_threads)
      .def_rw("simd_width", &DeviceLimits::simd_width)
      .def_rw("broken_sources", &DeviceLimits::broken_sources)
      .def_rw("broken_kernels", &DeviceLimits::broken_kernels)
      .def_rw("aborting_kernels", &DeviceLimits::aborting_kernels)
      .def_rw("endless_kernels", &DeviceLimits::endless_kernels)
      .def_rw("wrong_kernels", &DeviceLimits::wrong_kernels)
      .def_rw("watchdog_steps", &DeviceLimits::watchdog_steps)
      .def_rw("residency_sets", &DeviceLimits::residency_sets)
      .def_rw("residency_lapse_ms", &DeviceLimits::residency_lapse_ms)
      .def_rw("stale_no_copy", &DeviceLimits::stale_no_copy)
      .def_rw("binary_archives", &DeviceLimits::binary_archives)
      .def_rw("metal_tensor", &DeviceLimits::metal_tensor)
      .def_rw("out_of_memory", &DeviceLimits::out_of_memory)
      .def_rw("unified_memory", &DeviceLimits::unified_memory)
      .def_rw("compiler", &DeviceLimits::compiler)
      .def_rw("barriers", &DeviceLimits::barriers)
      .def_rw("survives_fork", &DeviceLimits::survives_fork)
      .def_rw("keeps_unused", &DeviceLimits::keeps_unused);
  m.def("Limits", &with_members<DeviceLimits>, nb::sig("def Limits(**members) -> DeviceLimits"));
  m.def("limits", &limits);
  m.def("set_limits", &set_limits, "limits"_a);
}

}  // namespace

void bind_emulator(nb::module_& m) {
  // NOLINTNEXTLINE(bugprone-throw-keyword-missing, bugprone-unused-raii)
  nb::exception<ValidationError>(m, "ValidationError", PyExc_RuntimeError);
  bind_records(m);
  bind_settings(m);
  m.def("live_objects", &live_objects, kWithoutGil);
  m.def("live_objects_by_class", &live_objects_by_class, kWithoutGil);
  m.def("live_buffers", &live_buffers, kWithoutGil);
  m.def("resident_bytes", &resident_bytes, kWithoutGil);
  m.def("counters", &counters);
  m.def("fail_allocation", &fail_allocation, "nth"_a = 1);
  m.def("allocation_will_fail", &allocation_will_fail);
  m.def("fail_command_buffer", &fail_command_buffer, "nth"_a = 1, "message"_a = "injected fault",
        "dispatches"_a = 0);
  m.def("refuse_commit", &refuse_commit, "nth"_a = 1, "message"_a = "injected fault");
  m.def("lose_residency", &lose_residency);
  m.def("clear_faults", &clear_faults);
  m.def("history", &history, kWithoutGil);
  m.def("set_history_depth", &set_history_depth, "command_buffers"_a);
  m.attr("sanitizer") = sanitizer();
  nb::class_<LibraryRecord>(m, "LibraryRecord")
      .def_ro("name", &LibraryRecord::name)
      .def_ro("fast_math", &LibraryRecord::fast_math)
      .def_ro("fast_functions", &LibraryRecord::fast_functions)
      .def_ro("kernels", &LibraryRecord::kernels)
      .def_ro("concurrent", &LibraryRecord::concurrent)
      .def_prop_ro("language", [](const LibraryRecord& record) {
        return nb::make_tuple(record.language_version >> 16, record.language_version & 0xffff);
      });
  m.def("compiled_libraries", &compiled_libraries);
  m.def("forget_compiled_libraries", &forget_compiled_libraries);
  m.def("take_violations", &take_violations);
}

}  // namespace metal_emulator
