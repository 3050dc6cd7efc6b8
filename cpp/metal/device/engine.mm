#include <algorithm>

#include "../plan/padding.h"
#include "../plan/supported.h"
#include "libraries.h"
#include "metal_cache.h"
#include "metal_engine.h"
#include "waits.h"

namespace metal_prefill {
namespace metal {
namespace {

// Initial rows of the rope tables of a session, so that its first prompts need not extend them.
constexpr int kFirstRopePositions = 2048;

// Default limit of K and V in bytes: half of the memory that command buffers can use besides the weights;
// they fail beyond it. A growing cache is copied from its buffer to a larger one, so that both must fit.
std::size_t default_kv_memory(const Device& device, const WeightBuffers& weights) {
  const std::size_t working_set = device.mtl().recommendedMaxWorkingSetSize;  // 0: unknown
  if (working_set == 0) return half_of_the_memory();
  const std::size_t taken = std::min(weights.mapped_bytes() + weights.copied_bytes(), working_set - 1);
  return std::min(half_of_the_memory(), (working_set - taken + 1) / 2);
}

}  // namespace

MetalEngine::MetalEngine(Model model, const EngineOptions& options)
    : Engine(std::move(model), options),
      device_(Device::of_engine(options.metal)),
      padded_(fits_kernels(model_.config) ? model_ : pad_model(model_)),
      weights_(device_, padded_),
      forward_(device_.tuning(), padded_, options_, weights_),
      kernels_(device_, forward_.kernels(), forward_.cache_type(), options_.metal),
      rope_tables_(padded_),
      residency_(device_, options_.metal.resident_seconds, !options_.metal.is_measured),
      pages_(device_, residency_, slot_use_, "kv_pages", "the KV cache", forward_.page_layout().bytes,
             options_.poison_cache),
      states_(device_, residency_, slot_use_, "states", "states of recurrent layers",
              std::max(forward_.state_layout().bytes(), std::size_t(16)), options_.poison_cache),
      memory_(pages_, forward_.state_layout().values > 0 ? &states_ : nullptr,
              options_.kv_memory > 0 ? options_.kv_memory : default_kv_memory(device_, weights_),
              options_.prefix_memory) {
  weights_.wait_until_read();
  for (id<MTLBuffer> buffer : weights_.buffers()) residency_.add(buffer);
  // Without any work on the GPU, macOS keeps resident memory wired after the process has ended.
  if (residency_.bytes() > 0) {
    const std::uint32_t value = 0;
    id<MTLBuffer> buffer = device_.allocate("first work", sizeof value, Access::kGpu);
    device_.upload({{{buffer, 0, sizeof value}}}, &value);
  }
  kernels_.check(forward_.kernels([this](const KernelKey& key) { return kernels_.max_threads(key); }));
}

std::vector<Dispatch> MetalEngine::plan(int tokens, int position) const {
  return record_prompt(forward_, tokens, position,
                       config().has_head ? RowOutput::kGreedy : RowOutput::kHidden);
}

void MetalEngine::add_call_stats(const CallCounters& counters, Stats& stats) const {
  stats["dispatches"] = double(counters.dispatches);
  stats["command_buffers"] = double(counters.command_buffers);
  stats["allocations"] = double(counters.allocations);
  stats["gpu_seconds"] = counters.gpu_seconds;
}

std::unique_ptr<Cache> MetalEngine::make_cache(int max_context) {
  require_unforked();
  const AutoreleasePool pool;
  rope_tables_.reserve(device_, std::min(max_context, kFirstRopePositions));
  return std::make_unique<MetalCache>(*this);
}

}  // namespace metal

std::shared_ptr<Engine> make_metal_engine(Model model, const EngineOptions& options) {
  metal::check_supported(model, options);
  const metal::AutoreleasePool pool;
  const auto make = [&model](const EngineOptions& chosen) {
    return std::shared_ptr<Engine>(new metal::MetalEngine(model, chosen), [](metal::MetalEngine* engine) {
      if (engine->forked() || metal::gpu_is_lost()) return;
      const metal::AutoreleasePool drained;
      delete engine;
    });
  };
  for (EngineOptions chosen = options;;) {
    try {
      return make(chosen);
    } catch (const metal::TensorKernelError& error) {
      error.exclude(chosen.metal);
    }
  }
}

std::vector<CompiledSource> compile_shaders() {
  const metal::AutoreleasePool pool;
  return metal::compile_sources(metal::Device().mtl());
}

std::shared_ptr<metal::SharedKernels> make_shared_kernels() {
  return std::make_shared<metal::SharedKernels>();
}

std::map<std::string, std::string> metal_device() {
  const metal::AutoreleasePool pool;
  try {
    const metal::Device device;
    return {{"name", device.name()},
            {"matmul_tensor",
             device.tuning().matmul_tensor ? "where it passes the self-test" : "not for this GPU"},
            {"families", device.families()},
            {"tuned_as_family", std::to_string(device.tuning().family)},
            {"tuned_for_cores", std::to_string(device.tuning().cores)},
            {"max_buffer_bytes", std::to_string(device.mtl().maxBufferLength)},
            {"working_set_bytes", std::to_string(device.mtl().recommendedMaxWorkingSetSize)}};
  } catch (const DeviceError& error) {
    return {{"problem", error.what()}};
  }
}

}  // namespace metal_prefill
