// Inspection of the passes of an engine with dispatches: their order, times and buffers.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine.h"

namespace metal_prefill {

// A buffer of a dispatch, from its binding on.
struct Contents {
  std::span<const std::byte> bytes;
  // Of a copy, which the bindings of one buffer share. Null for weights, which stay valid as long as the
  // engine.
  std::shared_ptr<const std::vector<std::byte>> owner;
};

// One dispatch of a GPU: the kernel, its buffers, and if it ran alone, its time.
struct Dispatch {
  std::string kernel;
  int layer = -1;                     // -1: before the layers or after them
  std::array<std::size_t, 3> grid{};  // threadgroups
  std::size_t threads = 0;            // of a threadgroup
  std::size_t threadgroup_bytes = 0;
  bool after_barrier = false;        // waits for the previous dispatches
  std::vector<std::string> buffers;  // labels, by binding
  std::vector<std::byte> args;       // the kernel's struct of shaders/args_fields.h
  std::string args_struct;           // its name
  // The rows of a kernel that reads or writes K and V: for each run of consecutive rows of a sequence, the
  // position of the first, and their number.
  std::vector<std::array<int, 2>> runs;
  double start = 0, end = 0;  // seconds of the GPU's clock
  // By binding, if a trace keeps them.
  std::vector<Contents> before, after;
};

// A pipeline that was built when the model was opened.
struct PipelineInfo {
  std::string kernel;
  double seconds = 0;  // that building it took; others were built at the same time
  std::size_t max_threads = 0;
};

struct Trace {
  std::vector<Dispatch> dispatches;
  std::set<std::size_t> kept;  // dispatches whose buffers are copied, by their numbers
};

// Access to the passes of an engine.
class PassInspector {
 public:
  virtual ~PassInspector() = default;
  virtual std::vector<PipelineInfo> pipelines() const = 0;
  // Whether the shaders were compiled when the package was built, or when the model was opened.
  virtual bool shaders_were_compiled() const = 0;
  // Why a GPU with matrix units does without them; empty: it uses them, or has none.
  virtual std::string no_matmul_tensor() const = 0;
  // The dispatches of a prompt of this length.
  virtual std::vector<Dispatch> plan(int tokens, int position) const = 0;
};

// Access to the passes of a session, which must outlive it.
class SessionInspector {
 public:
  // Null for engines without dispatches.
  static std::unique_ptr<SessionInspector> of(Session& session);

  std::vector<PipelineInfo> pipelines() const { return passes_.pipelines(); }
  bool shaders_were_compiled() const { return passes_.shaders_were_compiled(); }
  std::string no_matmul_tensor() const { return passes_.no_matmul_tensor(); }
  // The dispatches of forward_prompt for this number of tokens at the session's position. Computes and
  // changes nothing.
  std::vector<Dispatch> plan(int tokens) const;
  // As forward_prompt, with each dispatch run alone, so that its time can be read.
  PromptResult trace(std::span<const TokenId> tokens, Trace& trace, const Progress& progress);

 private:
  SessionInspector(Session& session, const PassInspector& passes) : session_(session), passes_(passes) {}
  Session& session_;
  const PassInspector& passes_;
};

}  // namespace metal_prefill
