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

// Contents of a dispatch's buffer, from the offset of its binding.
struct Contents {
  std::span<const std::byte> bytes;
  // Owner of a copy, which all bindings of the buffer share. Null for weights, which live as long as the
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
  // For a kernel that reads or writes K and V: the first position and the number of each run of consecutive
  // rows of one sequence.
  std::vector<std::array<int, 2>> runs;
  double start = 0, end = 0;  // seconds of the GPU's clock
  // Contents by binding, if a trace keeps them.
  std::vector<Contents> before, after;
};

// A pipeline that was built when the model was opened.
struct PipelineInfo {
  std::string kernel;
  double seconds = 0;  // build time; pipelines are built concurrently
  std::size_t max_threads = 0;
};

struct Trace {
  std::vector<Dispatch> dispatches;
  std::set<std::size_t> kept;  // indices of dispatches whose buffers are copied
};

// Access to the passes of an engine.
class PassInspector {
 public:
  virtual ~PassInspector() = default;
  virtual std::vector<PipelineInfo> pipelines() const = 0;
  // Whether the shaders were compiled with the package rather than when the model was opened.
  virtual bool shaders_were_compiled() const = 0;
  // Why the matrix units of the GPU are not used; empty if they are, or if it has none.
  virtual std::string no_matmul_tensor() const = 0;
  // The dispatches of a prompt of this length.
  virtual std::vector<Dispatch> plan(int tokens, int position) const = 0;
};

// Access to the passes of a session. The session must outlive it.
class SessionInspector {
 public:
  // Null for engines without dispatches.
  static std::unique_ptr<SessionInspector> of(Session& session);

  std::vector<PipelineInfo> pipelines() const { return passes_.pipelines(); }
  bool shaders_were_compiled() const { return passes_.shaders_were_compiled(); }
  std::string no_matmul_tensor() const { return passes_.no_matmul_tensor(); }
  // The dispatches of a greedy prompt with this number of tokens at the session's position. Computes and
  // changes nothing.
  std::vector<Dispatch> plan(int tokens) const;
  // Computes a greedy prompt, running each dispatch alone, to time it.
  PromptResult trace(std::span<const TokenId> tokens, Trace& trace, const Progress& progress);

 private:
  SessionInspector(Session& session, const PassInspector& passes) : session_(session), passes_(passes) {}
  Session& session_;
  const PassInspector& passes_;
};

}  // namespace metal_prefill
