// Functions with which tests observe and control the emulator, in addition to the Metal API. Plain C++.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "executor.h"

namespace metal_emulator {

// A use of the API on which Apple's validation layer aborts. The call throws it. If the error is found only
// when a command runs, the command buffer fails with the same message in its NSError.
struct ValidationError : std::logic_error {
  using std::logic_error::logic_error;
};

// Number of Objective-C objects that are not deallocated yet. Waits until nothing runs, so that other threads
// do not change the result.
long live_objects();
std::map<std::string, long> live_objects_by_class();

struct BufferInfo {
  std::string label;
  std::size_t length = 0;
  StorageMode storage_mode = StorageMode::kShared;
  bool no_copy = false;
};
std::vector<BufferInfo> live_buffers();  // in order of creation
std::size_t resident_bytes();            // of residency sets whose residency is requested

struct Counters {  // since the process started
  std::uint64_t buffers = 0, pipelines = 0, command_buffers = 0, dispatches = 0;
  std::uint64_t compiled_pipelines = 0;     // not found in an archive, or compiled to be added to one
  std::uint64_t waits = 0;                  // waits of the host for command buffers not seen completed
  std::uint64_t archived_pipelines = 0;     // added to archives
  std::uint64_t residency_faults = 0;       // residency sets that were needed after they had lapsed
  std::uint64_t residency_fault_bytes = 0;  // bytes of these sets
};
Counters counters();

// Faults, each of which occurs once. `nth` counts from 1, which is the next call.
void fail_allocation(int nth);  // newBuffer… returns nil
bool allocation_will_fail();    // whether the failure is still pending
// The command buffer runs `dispatches` of its dispatches, then fails.
void fail_command_buffer(int nth, const std::string& message, int dispatches = 0);
void refuse_commit(int nth, const std::string& message);  // commit throws a ValidationError
void lose_residency();                                    // the next residency set that is used has lapsed
void clear_faults();

// The options are initialized from METAL_EMULATOR_THREADS, METAL_EMULATOR_SEED, METAL_EMULATOR_CHECKED, and
// METAL_EMULATOR_FAST_ERRORS. Setting them waits until nothing runs.
ExecutorOptions options();
void set_options(const ExecutorOptions& options);

struct DeviceLimits {
  std::uint64_t max_buffer_length = 0;  // 0: half of the machine's memory
  std::uint64_t working_set_bytes = 0;  // 0: three quarters of the machine's memory
  int apple_family = 7;                 // 7 to 10 for M1 to M5
  std::string name;                     // prefix of the name that identifies the emulator
  bool no_copy = true;                  // false: newBufferWithBytesNoCopy returns nil
  bool simdgroup_matrix = true;         // false: kernels that use it cannot become pipelines
  // Values of maxTotalThreadsPerThreadgroup by kernel name; by default the executor's limit.
  std::map<std::string, std::uint32_t> max_threads;
  std::uint32_t simd_width = kSimdWidth;   // reported for all kernels; they always run with 32
  std::set<std::string> broken_sources;    // file names of sources that do not compile
  std::set<std::string> broken_kernels;    // kernels that cannot become pipelines
  std::set<std::string> aborting_kernels;  // compiling them to pipelines ends the process, as some drivers do
  std::set<std::string> endless_kernels;   // kernels whose command buffers never complete
  std::set<std::string> wrong_kernels;     // kernels whose first output is overwritten in its first bytes
  // A command buffer fails as if the watchdog of a Mac had ended it, if its kernels, or a single dispatch,
  // take more steps: one per thread, and one per barrier that it passes. 0: no limit.
  std::uint64_t watchdog_steps = 0;
  bool residency_sets = true;  // false: newResidencySetWithDescriptor returns nil
  // Residency lapses if it is not requested, and no command buffer of the queue uses it, for this time. 0:
  // never.
  std::uint64_t residency_lapse_ms = 0;
  // The GPU reads zeros beyond this many bytes of a no-copy buffer, and before them the memory's contents at
  // the time when the buffer was created. 0: no-copy buffers of any length work.
  std::uint64_t stale_no_copy = 0;
  // False: opening a binary archive from a file throws a ValidationError, as a Mac aborts the process, and
  // archives cannot be serialized. Adding functions works.
  bool binary_archives = true;
  bool metal_tensor = true;    // false: there is no such header, nor MetalPerformancePrimitives
  bool out_of_memory = false;  // command buffers fail if their buffers exceed working_set_bytes
  bool unified_memory = true;  // false: the GPU reports its own memory, as on Intel Macs
  bool compiler = true;        // false: compilation of sources and pipelines never ends
  bool barriers = true;        // false: adjacent dispatches of a command buffer are swapped
  bool survives_fork = true;   // false: requesting the device in a forked process aborts it
  // Memory stays resident after its set has ended, unless the GPU has run a command buffer since the request.
  bool keeps_unused = false;
};
DeviceLimits limits();
void set_limits(const DeviceLimits& limits);

struct BindingRecord {
  int index = 0;
  std::string name;                                               // name of the kernel's argument
  std::string label;                                              // label of the buffer; empty for setBytes
  std::uint64_t bytes_read = 0, bytes_written = 0;                // in checked mode, counted for every thread
  std::uint64_t unique_bytes_read = 0, unique_bytes_written = 0;  // the same, counting each byte once
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
  // Earlier committed command buffers of its queue that the host had not seen completed.
  std::size_t ahead_of_host = 0;
  std::vector<DispatchRecord> dispatches;
};
// The most recently completed command buffers, oldest first. None are recorded until a depth is set.
std::vector<CommandBufferRecord> history();
void set_history_depth(std::size_t command_buffers);

// The options of the most recently compiled libraries, oldest first.
struct LibraryRecord {
  std::string name;  // file name of the source
  bool fast_math = true;
  bool fast_functions = true;  // of single precision
  int language_version = 0;    // major << 16 | minor
  std::size_t kernels = 0;
  bool concurrent = false;  // whether the device was told to maximize concurrent compilation
};
std::vector<LibraryRecord> compiled_libraries();
void forget_compiled_libraries();

// Misuse that could not be thrown (an encoder released before endEncoding). The next call that makes a
// command buffer throws it, too.
std::vector<std::string> take_violations();

// "address" or "thread" if the emulator is built with that sanitizer, otherwise empty. Such builds have no
// checked mode; AddressSanitizer reports an access past a buffer's end and ends the process.
const char* sanitizer();

}  // namespace metal_emulator
