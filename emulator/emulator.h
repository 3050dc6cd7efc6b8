// Functions by which tests observe and control the emulator, in addition to the Metal API. Plain C++.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "executor.h"

namespace metal_emulator {

// A use of the API on which Apple's validation layer aborts. Thrown by the call; a mistake that is found only
// when a command runs makes the command buffer fail, with the same message in its NSError.
struct ValidationError : std::logic_error {
  using std::logic_error::logic_error;
};

// Objective-C objects that are not deallocated yet. Waits until nothing runs, so that the answer does not
// depend on the progress of other threads.
long live_objects();
std::map<std::string, long> live_objects_by_class();

enum class StorageMode : std::uint8_t { kShared = 0, kPrivate = 2 };

struct BufferInfo {
  std::string label;
  std::size_t length = 0;
  StorageMode storage_mode = StorageMode::kShared;
  bool no_copy = false;
};
std::vector<BufferInfo> live_buffers();  // in order of creation
std::size_t allocated_bytes();           // of live buffers, without no-copy buffers
std::size_t resident_bytes();            // of residency sets whose residency is requested

struct Counters {  // since the process started
  std::uint64_t buffers = 0, pipelines = 0, command_buffers = 0, dispatches = 0;
  std::uint64_t compiled_pipelines = 0;     // not found in an archive, and added to archives
  std::uint64_t waits = 0;                  // of the host for command buffers that it had not seen completed
  std::uint64_t archived_pipelines = 0;     // added to archives
  std::uint64_t residency_faults = 0;       // residency sets that were needed again after they had lapsed
  std::uint64_t residency_fault_bytes = 0;  // of them
};
Counters counters();

// Faults, each of which happens once. `nth` counts from 1, the next call.
void fail_allocation(int nth);  // newBuffer… returns nil
bool allocation_will_fail();    // it has not come yet
// The command buffer runs `dispatches` of its dispatches, then fails with MTLCommandBufferErrorDomain `code`.
void fail_command_buffer(int nth, const std::string& message, long code = 1, int dispatches = 0);
void refuse_commit(int nth, const std::string& message);  // commit throws a ValidationError
void lose_residency();                                    // the next residency set that is used had lapsed
void clear_faults();

// The options start from METAL_EMULATOR_THREADS, METAL_EMULATOR_SEED, METAL_EMULATOR_CHECKED,
// and METAL_EMULATOR_FAST_ERRORS. Setting them waits until nothing runs.
ExecutorOptions options();
void set_options(const ExecutorOptions& options);

struct DeviceLimits {
  std::uint64_t max_buffer_length = 0;  // 0: half the machine's memory
  std::uint64_t working_set_bytes = 0;  // 0: three quarters of the machine's memory
  int apple_family = 7;                 // 7 to 10 for M1 to M5
  std::string name;                     // precedes the name that identifies the emulator
  bool no_copy = true;                  // false: newBufferWithBytesNoCopy returns nil
  bool simdgroup_matrix = true;         // false: kernels that use it become no pipelines
  // Values that pipelines of a kernel report, by its name; by default the executor's limit.
  std::map<std::string, std::uint32_t> max_threads;
  std::uint32_t simd_width = kSimdWidth;   // the same for all kernels; they run with 32 in any case
  std::set<std::string> broken_sources;    // do not compile, by their file names
  std::set<std::string> broken_kernels;    // become no pipelines
  std::set<std::string> aborting_kernels;  // end the process as they become pipelines, as drivers do
  std::set<std::string> endless_kernels;   // command buffers with them never complete
  std::set<std::string> wrong_kernels;     // the first bytes of their first output are overwritten
  // A command buffer fails as from the watchdog of a Mac if its kernels, or a single dispatch, take more
  // steps: one for each thread, and one for each barrier that it passes. 0: no limit.
  std::uint64_t watchdog_steps = 0;
  bool residency_sets = true;  // false: newResidencySetWithDescriptor returns nil
  // Residency lapses if for this time it was not requested and no command buffer of the queue used it. 0:
  // never.
  std::uint64_t residency_lapse_ms = 0;
  // The GPU reads zeros beyond this many bytes of a no-copy buffer, and before them the contents of the
  // memory when the buffer was made. 0: no-copy buffers of any length work.
  std::uint64_t stale_no_copy = 0;
  // False: opening a binary archive from a file throws a ValidationError, as a Mac aborts the process, and an
  // archive cannot be serialized. Adding functions works.
  bool binary_archives = true;
  bool metal_tensor = true;    // false: no header of this name, nor of MetalPerformancePrimitives
  bool out_of_memory = false;  // command buffers fail whose buffers are together beyond working_set_bytes
  bool unified_memory = true;  // false: the GPU claims to have memory of its own, as those of Intel Macs
  bool compiler = true;        // false: compiling sources and pipelines never ends
  bool barriers = true;        // false: each dispatch of a command buffer changes places with its neighbour
  bool survives_fork = true;   // false: asking for the device in a forked process aborts it
  // Memory stays resident after its set has ended, unless the GPU has run a command buffer since it was
  // requested.
  bool keeps_unused = false;
};
DeviceLimits limits();
void set_limits(const DeviceLimits& limits);

struct BindingRecord {
  int index = 0;
  std::string name;                                               // of the kernel's argument
  std::string label;                                              // of the buffer; empty for setBytes
  std::uint64_t bytes_read = 0, bytes_written = 0;                // counted in checked mode: by every thread
  std::uint64_t unique_bytes_read = 0, unique_bytes_written = 0;  // the same, each byte once
};
struct DispatchRecord {
  std::string kernel;
  Dim3 grid, group;
  std::uint64_t threads = 0, barriers = 0;
  double seconds = 0;         // on the device, in timed mode
  bool after_barrier = true;  // false: may overlap the dispatch before it
  std::vector<BindingRecord> bindings;
};
struct CommandBufferRecord {
  std::string label, error;
  bool retained = true;  // the command buffer retains its buffers
  // Command buffers of its queue that were committed before it, and that the host had not seen completed.
  std::size_t ahead_of_host = 0;
  std::vector<DispatchRecord> dispatches;
};
// The last command buffers that were completed, oldest first. None are kept until a depth is set.
std::vector<CommandBufferRecord> history();
void set_history_depth(std::size_t command_buffers);

// The options that the last libraries were compiled with, oldest first.
struct LibraryRecord {
  std::string name;  // file name of the source
  bool fast_math = true;
  bool fast_functions = true;  // of single precision
  int language_version = 0;    // major << 16 | minor
  std::size_t kernels = 0;     // that it has
  bool concurrent = false;     // the device was told to maximize concurrent compilation
};
std::vector<LibraryRecord> compiled_libraries();
void forget_compiled_libraries();

// Misuse that could not be thrown (an encoder released before endEncoding). Each is also thrown by the next
// call that makes a command buffer.
std::vector<std::string> take_violations();

// "address" or "thread" when the emulator is built with that sanitizer, else empty. Such builds have no
// checked mode; AddressSanitizer reports an access past a buffer's end and ends the process.
const char* sanitizer();

}  // namespace metal_emulator
