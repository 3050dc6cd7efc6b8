// Where launches go: one stream on which all is in order, and others for what may overlap.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "events.h"
#include "graphs.h"

namespace metal_emulator::cuda {

class Streams {
 public:
  // With `overlaps`, kernels wait for the memory of those before by themselves.
  explicit Streams(bool overlaps);

  Stream main() const { return main_; }

  // One behind the other, on the main stream.
  void launch_in_order(const std::vector<Launch>& launches);
  // Those of a stage on as many streams as there are.
  void launch_stages(const std::vector<Launch>& launches);

 private:
  void launch_overlapping(std::span<const Launch> launches);
  void start(const Launch& launch, Stream stream) const;

  static constexpr std::size_t kSideStreams = 4;

  const bool overlaps_;
  Stream main_ = nullptr;
  std::array<Stream, kSideStreams> side_{};
  Events ordering_{kWithoutTime};
};

}  // namespace metal_emulator::cuda
