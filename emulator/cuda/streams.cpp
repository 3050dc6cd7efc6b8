#include "streams.h"

#include <algorithm>

#include "launches.h"

namespace metal_emulator::cuda {

Streams::Streams(const Device& device, bool overlaps) : overlaps_(overlaps) {
  device.enter();
  METAL_EMULATOR_CALL(cuStreamCreate, &main_, kNonBlocking);
  for (Stream& stream : side_) METAL_EMULATOR_CALL(cuStreamCreate, &stream, kNonBlocking);
  METAL_EMULATOR_CALL(cuEventCreate, &reached_, kWithoutTime);
}

void Streams::launch_stages(const std::vector<Launch>& launches) {
  for (std::size_t begin = 0; begin < launches.size();) {
    std::size_t end = begin + 1;
    while (end < launches.size() && launches[end].stage == launches[begin].stage) end++;
    launch_overlapping({&launches[begin], end - begin});
    begin = end;
  }
}

void Streams::launch_overlapping(std::span<const Launch> launches) {
  if (launches.size() == 1) return start(launches[0], main_);
  METAL_EMULATOR_CALL(cuEventRecord, reached_, main_);
  const std::size_t streams = std::min(kSideStreams, launches.size() - 1);
  for (std::size_t i = 0; i < streams; i++) {
    METAL_EMULATOR_CALL(cuStreamWaitEvent, side_[i], reached_, 0);
  }
  for (std::size_t i = 0; i < launches.size(); i++) {
    const std::size_t place = i % (streams + 1);
    start(launches[i], place == 0 ? main_ : side_[place - 1]);
  }
  for (std::size_t i = 0; i < streams; i++) {
    METAL_EMULATOR_CALL(cuEventRecord, reached_, side_[i]);
    METAL_EMULATOR_CALL(cuStreamWaitEvent, main_, reached_, 0);
  }
}

void Streams::start(const Launch& launch, Stream stream) const {
  LaunchAttribute overlap{};
  overlap.id = kSerialization;
  overlap.value = 1;
  const LaunchConfig config = {
      launch.groups.x,  launch.groups.y,          launch.groups.z, launch.threads.x, launch.threads.y,
      launch.threads.z, launch.threadgroup_bytes, stream,          &overlap,         overlaps_ ? 1u : 0u};
  // The driver copies the parameters.
  void* parameters[] = {const_cast<std::byte*>(launch.parameters.data())};
  const Result result = Driver::get().cuLaunchKernelEx(&config, launch.function, parameters, nullptr);
  if (result != 0) fail(*launch.command, "the launch failed: " + describe(result));
}

}  // namespace metal_emulator::cuda
