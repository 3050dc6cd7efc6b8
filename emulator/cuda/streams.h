// Streams for launches: a main stream, which runs in order, and side streams for launches that may overlap.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "device.h"
#include "graphs.h"

namespace metal_emulator::cuda {

class Streams {
 public:
  // With `overlaps`, a kernel may start before the previous one has ended, and itself waits for the results.
  Streams(const Device& device, bool overlaps);

  Stream main() const { return main_; }

  void start(const Launch& launch, Stream stream) const;
  // Launches stage by stage. Launches of a stage may overlap, on different streams.
  void launch_stages(const std::vector<Launch>& launches);

 private:
  void launch_overlapping(std::span<const Launch> launches);

  static constexpr std::size_t kSideStreams = 4;

  const bool overlaps_;
  Stream main_ = nullptr;
  std::array<Stream, kSideStreams> side_{};
  Event reached_ = nullptr;  // recorded on a stream for others to wait for
};

}  // namespace metal_emulator::cuda
