// Command buffers whose form is used again become graphs of the driver, which start in one call and with less
// time between their kernels than single launches.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "../executor.h"
#include "driver.h"

namespace metal_emulator::cuda {

// A kernel's launch, ready for the driver.
struct Launch {
  Function function = nullptr;
  Dim3 groups, threads;
  std::uint32_t threadgroup_bytes = 0;
  const DispatchCommand* command = nullptr;  // that it comes from, until it is launched
  std::size_t stage = 0;  // launches of a stage may overlap; each stage waits for the one before
  std::vector<std::byte> parameters;
};

class Graph {
 public:
  // With `overlaps`, a kernel may start before the previous one has ended: it waits for the results itself.
  Graph(std::vector<Launch> launches, bool overlaps);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Runs launches of the same number, functions and stages; everything else that has changed is updated.
  void run(std::vector<Launch> launches, Stream stream);

 private:
  void build(bool overlaps);

  std::vector<Launch> launches_;  // as the graph has them
  std::vector<GraphNode> nodes_;
  GraphHandle graph_ = nullptr;
  GraphExec executable_ = nullptr;
};

// The graphs of the forms used last. A new form is launched one by one: most prompts occur once.
class Graphs {
 public:
  explicit Graphs(bool overlaps) : overlaps_(overlaps) {}

  // Runs the launches as a graph, or leaves them alone and returns false.
  bool run(std::vector<Launch>& launches, Stream stream);

 private:
  struct Form {
    std::vector<std::pair<Function, std::size_t>> kernels;
    std::unique_ptr<Graph> graph;  // null until the form is used again
  };
  const bool overlaps_;
  std::list<Form> forms_;  // the one used last first
};

}  // namespace metal_emulator::cuda
