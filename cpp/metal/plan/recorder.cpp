#include "recorder.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "padding.h"
#include "supported.h"

namespace metal_prefill::metal {

Dispatch describe(const Step& step, KvType cache) {
  Dispatch dispatch = {.kernel = kernel_name(step.kernel, cache),
                       .layer = step.layer,
                       .grid = {step.grid.x, step.grid.y, step.grid.z},
                       .threads = step.grid.threads,
                       .threadgroup_bytes = step.grid.threadgroup_bytes,
                       .after_barrier = step.after_barrier};
  for (const View& view : step.buffers) dispatch.buffers.push_back(traits_of(view.name).label);
  const auto* bytes = static_cast<const std::byte*>(step.args);
  dispatch.args.assign(bytes, bytes + step.layout.bytes);
  dispatch.args_struct = step.layout.name;
  for (const RowRun& run : step.runs) dispatch.runs.push_back({run.position, run.count});
  return dispatch;
}

std::vector<Dispatch> record_prompt(const ForwardPass& forward, int tokens, int position, RowOutput output) {
  std::vector<Dispatch> dispatches;
  RecordedBuffers buffers;
  for (int done = 0; done < tokens;) {
    const int n = std::min(forward.pass_rows(), tokens - done);
    const bool has_output = done + n == tokens || output == RowOutput::kLogProbs;
    const PassChunk chunk = last_rows(n, position + done, has_output ? output : RowOutput::kNone);
    Recorder recorder(forward.tuning(), forward.cache_type());
    forward.encode(recorder, forward.rows_of({{chunk}}), buffers);
    for (Dispatch& dispatch : recorder.take()) dispatches.push_back(std::move(dispatch));
    done += n;
  }
  return dispatches;
}

namespace {

const Tuning& tuning_of(int family) {
  std::string known;
  for (const Tuning& tuning : kTunings) {
    if (tuning.family == family) return tuning;
    known += (known.empty() ? "" : ", ") + std::to_string(tuning.family);
  }
  throw std::invalid_argument("unknown GPU family " + std::to_string(family) + "; known are " + known);
}

}  // namespace

std::vector<Dispatch> plan(const Model& shape, int tokens, int position, RowOutput output, int family,
                           const std::string& gpu, const EngineOptions& options) {
  if (tokens < 1 || position < 0)
    throw std::invalid_argument("cannot plan " + std::to_string(tokens) + " tokens at position " +
                                std::to_string(position));
  const Tuning tuning = tuned_by(options.metal, tuned_for(tuning_of(family), gpu));
  validate(shape);
  check_supported(shape, options);
  const Config& c = shape.config;
  if (!fits_kernels(c))
    throw UnsupportedModelError("a plan needs dimensions that are multiples of 8, got dim " +
                                std::to_string(c.dim) + ", heads of " + std::to_string(c.key_dim) + " and " +
                                std::to_string(c.value_dim) + ", ffn_dim " + std::to_string(c.ffn_dim));
  RecordedWeights weights(shape);
  return record_prompt(ForwardPass(tuning, shape, options, weights), tokens, position, output);
}

}  // namespace metal_prefill::metal
