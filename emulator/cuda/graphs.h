// Converts command buffers whose form is reused to graphs of the driver, which start in one call and leave
// less time between kernels than single launches.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "../executor.h"
#include "driver.h"

namespace metal_emulator::cuda {

// A kernel launch, ready for the driver.
struct Launch {
  Function function = nullptr;
  Dim3 groups, threads;
  std::uint32_t threadgroup_bytes = 0;
  const DispatchCommand* command = nullptr;  // the dispatch, until it is launched
  std::size_t stage = 0;  // launches of a stage may overlap; each stage waits for the previous one
  std::vector<std::byte> parameters;
};

class Graph {
 public:
  // With `overlaps`, a kernel may start before the previous one has ended, and itself waits for the results.
  Graph(std::vector<Launch> launches, bool overlaps);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Runs launches with the same number, functions and stages. Updates everything else that has changed.
  void run(std::vector<Launch> launches, Stream stream);

 private:
  void build(bool overlaps);

  std::vector<Launch> launches_;  // as they are in the graph
  std::vector<GraphNode> nodes_;
  GraphHandle graph_ = nullptr;
  GraphExec executable_ = nullptr;
};

// The most recently used graphs. A new form is launched kernel by kernel, as most prompts occur once.
class Graphs {
 public:
  explicit Graphs(bool overlaps) : overlaps_(overlaps) {}

  // Runs the launches as a graph, or leaves them unchanged and returns false.
  bool run(std::vector<Launch>& launches, Stream stream);

 private:
  struct Form {
    std::vector<std::pair<Function, std::size_t>> kernels;
    std::unique_ptr<Graph> graph;  // null until the form is reused
  };
  const bool overlaps_;
  std::list<Form> forms_;  // most recently used first
};

}  // namespace metal_emulator::cuda
