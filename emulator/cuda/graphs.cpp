#include "graphs.h"

#include <algorithm>

namespace metal_emulator::cuda {
namespace {

// A graph pays off if it has many launches and its form is reused.
constexpr std::size_t kFewestLaunches = 16;
constexpr std::size_t kMostForms = 16;

KernelNode node_of(const Launch& launch, void** parameters) {
  return {.function = launch.function,
          .grid_x = launch.groups.x,
          .grid_y = launch.groups.y,
          .grid_z = launch.groups.z,
          .block_x = launch.threads.x,
          .block_y = launch.threads.y,
          .block_z = launch.threads.z,
          .shared_bytes = launch.threadgroup_bytes,
          .parameters = parameters};
}

bool same(const Launch& a, const Launch& b) {
  return a.groups == b.groups && a.threads == b.threads && a.threadgroup_bytes == b.threadgroup_bytes &&
         a.parameters == b.parameters;
}

}  // namespace

Graph::Graph(std::vector<Launch> launches, bool overlaps) : launches_(std::move(launches)) {
  METAL_EMULATOR_CALL(cuGraphCreate, &graph_, 0);
  try {
    build(overlaps);
  } catch (...) {
    Driver::get().cuGraphDestroy(graph_);
    throw;
  }
}

Graph::~Graph() {
  Driver::get().cuGraphExecDestroy(executable_);
  Driver::get().cuGraphDestroy(graph_);
}

// Each launch depends on all launches of the previous stage.
void Graph::build(bool overlaps) {
  nodes_.resize(launches_.size());
  std::size_t before = 0, begin = 0;  // first launch of the previous stage, and of this one
  for (std::size_t i = 0; i < launches_.size(); i++) {
    if (launches_[i].stage != launches_[begin].stage) {
      before = begin;
      begin = i;
    }
    void* parameters[] = {launches_[i].parameters.data()};
    const KernelNode node = node_of(launches_[i], parameters);
    METAL_EMULATOR_CALL(cuGraphAddKernelNode_v2, &nodes_[i], graph_, nullptr, 0, &node);
    const GraphEdge waits_for_memory = {.from_port = kWhenLaunched, .type = kProgrammatic};
    const GraphEdge edge = overlaps ? waits_for_memory : GraphEdge{};
    for (std::size_t j = before; j < begin; j++) {
      METAL_EMULATOR_CALL(cuGraphAddDependencies_v2, graph_, &nodes_[j], &nodes_[i], &edge, 1);
    }
  }
  METAL_EMULATOR_CALL(cuGraphInstantiateWithFlags, &executable_, graph_, 0);
}

void Graph::run(std::vector<Launch> launches, Stream stream) {
  for (std::size_t i = 0; i < launches.size(); i++) {
    if (same(launches[i], launches_[i])) continue;
    void* parameters[] = {launches[i].parameters.data()};
    const KernelNode node = node_of(launches[i], parameters);
    METAL_EMULATOR_CALL(cuGraphExecKernelNodeSetParams_v2, executable_, nodes_[i], &node);
    launches_[i] = std::move(launches[i]);
  }
  METAL_EMULATOR_CALL(cuGraphLaunch, executable_, stream);
}

bool Graphs::run(std::vector<Launch>& launches, Stream stream) {
  if (launches.size() < kFewestLaunches || !Driver::get().has_graphs) return false;
  const auto known = std::ranges::find_if(forms_, [&](const Form& form) {
    return std::ranges::equal(form.kernels, launches, [](const auto& kernel, const Launch& launch) {
      return kernel.first == launch.function && kernel.second == launch.stage;
    });
  });
  if (known == forms_.end()) {
    Form& form = forms_.emplace_front();
    for (const Launch& launch : launches) form.kernels.emplace_back(launch.function, launch.stage);
    if (forms_.size() > kMostForms) forms_.pop_back();
    return false;
  }
  forms_.splice(forms_.begin(), forms_, known);
  if (!known->graph) known->graph = std::make_unique<Graph>(launches, overlaps_);
  known->graph->run(std::move(launches), stream);
  return true;
}

}  // namespace metal_emulator::cuda
