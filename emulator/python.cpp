// emulator.h for Python. To be compiled into each extension that contains an emulator.
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

nb::tuple to_tuple(const Dim3& size) {
  return nb::make_tuple(size.x, size.y, size.z);
}

void bind_records(nb::module_& m) {
  nb::class_<BufferInfo>(m, "BufferInfo", "A buffer that is alive.")
      .def_ro("label", &BufferInfo::label)
      .def_ro("length", &BufferInfo::length)
      .def_prop_ro("storage_mode",
                   [](const BufferInfo& info) {
                     return info.storage_mode == StorageMode::kPrivate ? "private" : "shared";
                   })
      .def_ro("no_copy", &BufferInfo::no_copy)
      .def("__repr__", [](const BufferInfo& info) {
        return "BufferInfo('" + info.label + "', " + std::to_string(info.length) +
               (info.storage_mode == StorageMode::kPrivate ? ", private" : ", shared") +
               (info.no_copy ? ", no copy)" : ")");
      });
  nb::class_<Counters>(m, "Counters", "What was made since the process started.")
      .def_ro("buffers", &Counters::buffers)
      .def_ro("pipelines", &Counters::pipelines)
      .def_ro("libraries", &Counters::libraries)
      .def_ro("compiled_pipelines", &Counters::compiled_pipelines,
              "Those that no archive had, and those added to archives.")
      .def_ro("waits", &Counters::waits, "Of the host for command buffers that it had not seen completed.")
      .def_ro("archived_pipelines", &Counters::archived_pipelines, "Added to archives.")
      .def_ro("residency_fault_bytes", &Counters::residency_fault_bytes)
      .def_ro("residency_faults", &Counters::residency_faults,
              "Residency sets that were needed again after they had lapsed.")
      .def_ro("command_buffers", &Counters::command_buffers, "Those that were committed.")
      .def_ro("dispatches", &Counters::dispatches, "Of the committed command buffers.");
  nb::class_<BindingRecord>(m, "BindingRecord", "A buffer argument of a dispatch.")
      .def_ro("index", &BindingRecord::index)
      .def_ro("name", &BindingRecord::name, "Of the kernel's argument.")
      .def_ro("label", &BindingRecord::label, "Of the buffer; empty for setBytes.")
      .def_ro("bytes_read", &BindingRecord::bytes_read, "By every thread; counted in checked mode.")
      .def_ro("bytes_written", &BindingRecord::bytes_written, "By every thread; counted in checked mode.")
      .def_ro("unique_bytes_read", &BindingRecord::unique_bytes_read, "The same, each byte once.")
      .def_ro("unique_bytes_written", &BindingRecord::unique_bytes_written, "The same, each byte once.");
  nb::class_<DispatchRecord>(m, "DispatchRecord", "A dispatch of a completed command buffer.")
      .def_ro("kernel", &DispatchRecord::kernel)
      .def_prop_ro(
          "grid", [](const DispatchRecord& record) { return to_tuple(record.grid); }, "In threadgroups.")
      .def_prop_ro(
          "group", [](const DispatchRecord& record) { return to_tuple(record.group); }, "In threads.")
      .def_ro("threads", &DispatchRecord::threads)
      .def_ro("barriers", &DispatchRecord::barriers)
      .def_ro("seconds", &DispatchRecord::seconds, "On the device, with METAL_EMULATOR_TIMED=1.")
      .def_ro("after_barrier", &DispatchRecord::after_barrier)
      .def_ro("bindings", &DispatchRecord::bindings);
  nb::class_<CommandBufferRecord>(m, "CommandBufferRecord", "A completed command buffer.")
      .def_ro("label", &CommandBufferRecord::label)
      .def_ro("error", &CommandBufferRecord::error, "Empty when all went well.")
      .def_ro("retained", &CommandBufferRecord::retained, "Whether it kept what it used.")
      .def_ro("ahead_of_host", &CommandBufferRecord::ahead_of_host,
              "Command buffers of its queue that were committed before it, and that the host had not seen "
              "completed.")
      .def_ro("start_seconds", &CommandBufferRecord::start_seconds)
      .def_ro("end_seconds", &CommandBufferRecord::end_seconds)
      .def_ro("dispatches", &CommandBufferRecord::dispatches);
}

// Counts the bytes that dispatches read and write from start() to stop().
class DispatchCounter {
 public:
  void start() {
    before_ = options();
    ExecutorOptions checked = before_;
    checked.checked = true;
    set_options(checked);
  }
  void stop() {
    set_options(before_);
    set_history_depth(0);
  }
  // Clears all counts; keeps at most this many of the next command buffers.
  void expect(std::size_t command_buffers) {
    set_history_depth(0);
    set_history_depth(command_buffers);
  }
  std::vector<DispatchRecord> counted() const {
    std::vector<DispatchRecord> records;
    for (const CommandBufferRecord& buffer : history()) {
      records.insert(records.end(), buffer.dispatches.begin(), buffer.dispatches.end());
    }
    return records;
  }

 private:
  ExecutorOptions before_;
};

void bind_counter(nb::module_& m) {
  constexpr auto kWithoutGil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<DispatchCounter>(m, "DispatchCounter",
                              "Counts, in its context, the bytes that dispatches read and write.")
      .def(nb::init<>())
      .def("__enter__",
           [](nb::handle self) {
             DispatchCounter& counter = nb::cast<DispatchCounter&>(self);
             const nb::gil_scoped_release release;
             counter.start();
             return self;
           })
      .def("__exit__",
           [](DispatchCounter& self, const nb::args&) {
             const nb::gil_scoped_release release;
             self.stop();
           })
      .def("expect", &DispatchCounter::expect, "command_buffers"_a, kWithoutGil,
           "Forget all counts, and keep those of the next command buffers, this many at most.")
      .def("counted", &DispatchCounter::counted, kWithoutGil,
           "Return the dispatches of the command buffers that were completed since `expect`, in order.");
}

void bind_settings(nb::module_& m) {
  nb::enum_<MatrixLayout>(m, "MatrixLayout", "Which elements of a simdgroup_matrix a lane holds.")
      .value("APPLE", MatrixLayout::kApple, "Neighbours of a row, as on Apple's GPUs.")
      .value("CONSECUTIVE", MatrixLayout::kConsecutive, "Neighbours of a row, in the order of the lanes.")
      .value("SHIFTED", MatrixLayout::kShifted, "The same with the first two elements in the last lane.")
      .value("COLUMNS", MatrixLayout::kColumns, "Neighbours of a column.");
  nb::class_<ExecutorOptions>(m, "Options", "How kernels are run.")
      .def(
          "__init__",
          [](ExecutorOptions* self, unsigned workers, std::uint64_t seed, bool checked, bool fast_errors,
             MatrixLayout matrix_layout) {
            new (self) ExecutorOptions{workers, seed, checked, fast_errors, matrix_layout};
          },
          "workers"_a = 0, "seed"_a = 0, "checked"_a = false, "fast_errors"_a = false,
          "matrix_layout"_a = MatrixLayout::kApple)
      .def_rw("workers", &ExecutorOptions::workers, "Host threads that run threadgroups; 0: one per core.")
      .def_rw("seed", &ExecutorOptions::seed, "Shuffles the order of threads; 0: in order.")
      .def_rw("checked", &ExecutorOptions::checked,
              "Record which bytes each dispatch touches, and judge by them.")
      .def_rw("fast_errors", &ExecutorOptions::fast_errors,
              "fast::exp and fast::exp2 have the largest error that Metal's specification allows.")
      .def_rw("matrix_layout", &ExecutorOptions::matrix_layout,
              "Of the CPU executor; an NVIDIA GPU has its own.");
  m.def("options", &options, nb::call_guard<nb::gil_scoped_release>());
  m.def("set_options", &set_options, "options"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Waits until nothing runs.");

  nb::class_<DeviceLimits>(m, "Limits", "What the emulated device claims to be.")
      .def(
          "__init__",
          [](DeviceLimits* self, std::uint64_t max_buffer_length, std::uint64_t working_set_bytes,
             int apple_family, const std::string& name, bool no_copy, bool simdgroup_matrix,
             const std::map<std::string, std::uint32_t>& max_threads, std::uint32_t simd_width,
             const std::set<std::string>& broken_sources, const std::set<std::string>& broken_kernels,
             const std::set<std::string>& aborting_kernels, const std::set<std::string>& endless_kernels,
             const std::set<std::string>& wrong_kernels, std::uint64_t watchdog_steps, bool residency_sets,
             std::uint64_t residency_lapse_ms, std::uint64_t stale_no_copy, bool binary_archives,
             bool metal_tensor, bool out_of_memory, bool unified_memory, bool compiler, bool barriers,
             bool survives_fork, bool keeps_unused) {
            new (self) DeviceLimits{
                max_buffer_length,  working_set_bytes, apple_family,    name,           no_copy,
                simdgroup_matrix,   max_threads,       simd_width,      broken_sources, broken_kernels,
                aborting_kernels,   endless_kernels,   wrong_kernels,   watchdog_steps, residency_sets,
                residency_lapse_ms, stale_no_copy,     binary_archives, metal_tensor,   out_of_memory,
                unified_memory,     compiler,          barriers,        survives_fork,  keeps_unused};
          },
          "max_buffer_length"_a = 0, "working_set_bytes"_a = 0, "apple_family"_a = 7, "name"_a = "",
          "no_copy"_a = true, "simdgroup_matrix"_a = true,
          "max_threads"_a = std::map<std::string, std::uint32_t>(), "simd_width"_a = kSimdWidth,
          "broken_sources"_a = std::set<std::string>(), "broken_kernels"_a = std::set<std::string>(),
          "aborting_kernels"_a = std::set<std::string>(), "endless_kernels"_a = std::set<std::string>(),
          "wrong_kernels"_a = std::set<std::string>(), "watchdog_steps"_a = 0, "residency_sets"_a = true,
          "residency_lapse_ms"_a = 0, "stale_no_copy"_a = 0, "binary_archives"_a = true,
          "metal_tensor"_a = true, "out_of_memory"_a = false, "unified_memory"_a = true, "compiler"_a = true,
          "barriers"_a = true, "survives_fork"_a = true, "keeps_unused"_a = false)
      .def_rw("max_buffer_length", &DeviceLimits::max_buffer_length, "0: half the machine's memory.")
      .def_rw("working_set_bytes", &DeviceLimits::working_set_bytes,
              "0: three quarters of the machine's memory.")
      .def_rw("apple_family", &DeviceLimits::apple_family, "7 (M1) to 10 (M5).")
      .def_rw("name", &DeviceLimits::name, "Precedes the name that says what this is.")
      .def_rw("no_copy", &DeviceLimits::no_copy, "False: newBufferWithBytesNoCopy returns nil.")
      .def_rw("simdgroup_matrix", &DeviceLimits::simdgroup_matrix,
              "False: kernels that use it become no pipelines.")
      .def_rw("max_threads", &DeviceLimits::max_threads,
              "maxTotalThreadsPerThreadgroup of the pipelines of a kernel, by its name.")
      .def_rw("simd_width", &DeviceLimits::simd_width,
              "threadExecutionWidth of pipelines; kernels run with 32 whatever this says.")
      .def_rw("broken_sources", &DeviceLimits::broken_sources, "They do not compile; names of files.")
      .def_rw("broken_kernels", &DeviceLimits::broken_kernels, "They become no pipelines.")
      .def_rw("aborting_kernels", &DeviceLimits::aborting_kernels,
              "They abort the process as they become pipelines.")
      .def_rw("endless_kernels", &DeviceLimits::endless_kernels, "Command buffers with them never complete.")
      .def_rw("wrong_kernels", &DeviceLimits::wrong_kernels,
              "The first bytes of their first output are overwritten.")
      .def_rw("watchdog_steps", &DeviceLimits::watchdog_steps,
              "Most steps of threads of a command buffer, and of a dispatch: a thread counts once, and once "
              "more for each "
              "barrier that it passes. 0: no limit.")
      .def_rw("residency_sets", &DeviceLimits::residency_sets,
              "False: newResidencySetWithDescriptor returns nil.")
      .def_rw("residency_lapse_ms", &DeviceLimits::residency_lapse_ms,
              "Residency lapses when for so long it was neither requested nor used. 0: never.")
      .def_rw("stale_no_copy", &DeviceLimits::stale_no_copy,
              "The GPU reads zeros beyond so many bytes of a no-copy buffer. 0: it reads all of it.")
      .def_rw("binary_archives", &DeviceLimits::binary_archives,
              "False: opening an archive from a file raises ValidationError, serializing one fails.")
      .def_rw("metal_tensor", &DeviceLimits::metal_tensor,
              "False: sources that include <metal_tensor> do not compile.")
      .def_rw("out_of_memory", &DeviceLimits::out_of_memory,
              "Command buffers fail whose buffers are together larger than working_set_bytes.")
      .def_rw("unified_memory", &DeviceLimits::unified_memory, "False: hasUnifiedMemory is NO.")
      .def_rw("compiler", &DeviceLimits::compiler, "False: compiling sources and pipelines never ends.")
      .def_rw("barriers", &DeviceLimits::barriers,
              "False: each dispatch of a command buffer changes places with its neighbour.")
      .def_rw("survives_fork", &DeviceLimits::survives_fork,
              "False: asking for the device in a forked process aborts it.")
      .def_rw("keeps_unused", &DeviceLimits::keeps_unused,
              "Memory stays resident after its set has ended if no command buffer has run since it was "
              "requested.");
  m.def("limits", &limits);
  m.def("set_limits", &set_limits, "limits"_a);
}

}  // namespace

void bind_emulator(nb::module_& m) {
  // NOLINTNEXTLINE(bugprone-throw-keyword-missing, bugprone-unused-raii)
  nb::exception<ValidationError>(m, "ValidationError", PyExc_RuntimeError);
  bind_records(m);
  bind_settings(m);
  bind_counter(m);
  constexpr auto kWithoutGil = nb::call_guard<nb::gil_scoped_release>();
  m.def("live_objects", &live_objects, kWithoutGil,
        "Return how many Objective-C objects are not deallocated yet. Waits until nothing runs.");
  m.def("live_objects_by_class", &live_objects_by_class, kWithoutGil);
  m.def("live_buffers", &live_buffers, kWithoutGil,
        "Return the buffers that are alive, in order of creation.");
  m.def("allocated_bytes", &allocated_bytes, kWithoutGil,
        "Return the bytes of live buffers, those without copy left out.");
  m.def("resident_bytes", &resident_bytes, kWithoutGil,
        "Return the bytes of residency sets whose residency is requested.");
  m.def("counters", &counters);
  m.def("fail_allocation", &fail_allocation, "nth"_a = 1, "Make the nth next newBuffer return nil.");
  m.def("allocation_will_fail", &allocation_will_fail, "Return whether that newBuffer is still to come.");
  m.def("fail_command_buffer", &fail_command_buffer, "nth"_a = 1, "message"_a = "injected fault",
        "code"_a = 1, "dispatches"_a = 0,
        "Make the nth next command buffer run that many of its dispatches and fail with an NSError of the "
        "given "
        "MTLCommandBufferError code.");
  m.def("refuse_commit", &refuse_commit, "nth"_a = 1, "message"_a = "injected fault",
        "Make the commit of the nth next command buffer throw a ValidationError.");
  m.def("lose_residency", &lose_residency, "The next residency set that is used had lapsed.");
  m.def("clear_faults", &clear_faults);
  m.def("history", &history, kWithoutGil, "Return the last completed command buffers, oldest first.");
  m.def("set_history_depth", &set_history_depth, "command_buffers"_a,
        "Keep that many command buffers for history(); 0, as at first, keeps none.");
  m.attr("sanitizer") = sanitizer();
  nb::class_<LibraryRecord>(m, "LibraryRecord", "A library that was compiled from source.")
      .def_ro("name", &LibraryRecord::name, "File name of the source.")
      .def_ro("fast_math", &LibraryRecord::fast_math)
      .def_ro("fast_functions", &LibraryRecord::fast_functions, "Of single precision.")
      .def_ro("kernels", &LibraryRecord::kernels, "How many it has.")
      .def_ro("concurrent", &LibraryRecord::concurrent,
              "Whether the device was told to maximize concurrent compilation.")
      .def_prop_ro("language", [](const LibraryRecord& record) {
        return nb::make_tuple(record.language_version >> 16, record.language_version & 0xffff);
      });
  m.def("compiled_libraries", &compiled_libraries,
        "Return the last libraries that were compiled from source, oldest first.");
  m.def("forget_compiled_libraries", &forget_compiled_libraries);
  m.def("take_violations", &take_violations,
        "Return and forget misuse that was found where nothing could be thrown.");
}

nb::object make_dispatch_counter() {
  return *sanitizer() ? nb::none() : nb::cast(DispatchCounter());
}

}  // namespace metal_emulator
