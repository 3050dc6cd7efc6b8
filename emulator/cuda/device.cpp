#include "device.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>

namespace metal_emulator::cuda {
namespace {

// Memory at an address of the device.
class DeviceAllocation final : public Allocation {
 public:
  // `seen` is the host's view of the same memory, or null. `release` is called by the destructor.
  DeviceAllocation(Address address, std::size_t length, std::shared_ptr<Allocation> seen,
                   std::function<void()> release)
      : seen_(std::move(seen)), release_(std::move(release)) {
    device_address = address;
    bytes = length;
  }
  DeviceAllocation(const DeviceAllocation&) = delete;
  DeviceAllocation& operator=(const DeviceAllocation&) = delete;
  ~DeviceAllocation() override { release_(); }
  void* host() override { return seen_ ? seen_->host() : nullptr; }
  bool intact() override { return !seen_ || seen_->intact(); }

 private:
  const std::shared_ptr<Allocation> seen_;
  const std::function<void()> release_;
};

// Waits for fills and copies, which may continue after their calls. Other streams do not wait for them.
void wait_for_default_stream() {
  METAL_EMULATOR_CALL(cuStreamSynchronize, nullptr);
}

std::uintptr_t page_floor(const void* memory) {
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  return reinterpret_cast<std::uintptr_t>(memory) / page * page;
}

std::shared_ptr<Allocation> map(const Device& device, std::shared_ptr<Allocation> inner) {
  if (!inner) return nullptr;
  device.enter();
  auto* memory = static_cast<char*>(inner->host());
  // Registers whole pages.
  auto* first = reinterpret_cast<char*>(page_floor(memory));
  const std::size_t length = page_floor(memory + inner->bytes - 1) - page_floor(memory) +
                             static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (Driver::get().cuMemHostRegister_v2(first, length, kMapped) != 0) return nullptr;
  const auto unregister = [&device, first] {
    device.enter();
    Driver::get().cuMemHostUnregister(first);
  };
  Address address = 0;
  if (Driver::get().cuMemHostGetDevicePointer_v2(&address, first, 0) != 0) {
    unregister();
    return nullptr;
  }
  const std::size_t bytes = inner->bytes;
  return std::make_shared<DeviceAllocation>(address + static_cast<Address>(memory - first), bytes,
                                            std::move(inner), unregister);
}

// Whether no thread of this process can write to any of the pages.
bool is_read_only(const void* memory, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
  std::ifstream maps("/proc/self/maps");
  std::uintptr_t covered = begin;
  for (std::string line; std::getline(maps, line);) {
    unsigned long first = 0, last = 0;
    char writable = 'w';
    if (std::sscanf(line.c_str(), "%lx-%lx %*c%c", &first, &last, &writable) != 3) continue;
    if (last <= begin || first >= end) continue;
    if (writable == 'w' || first > covered) return false;
    covered = last;
  }
  return covered >= end;
}

}  // namespace

Device::Device() {
  METAL_EMULATOR_CALL(cuInit, 0);
  int device = 0, major = 0, minor = 0;
  METAL_EMULATOR_CALL(cuDeviceGet, &device, 0);
  char name[256] = "";
  METAL_EMULATOR_CALL(cuDeviceGetName, name, sizeof name, device);
  name_ = name;
  METAL_EMULATOR_CALL(cuDeviceGetAttribute, &major, kCapabilityMajor, device);
  METAL_EMULATOR_CALL(cuDeviceGetAttribute, &minor, kCapabilityMinor, device);
  capability_ = major * 10 + minor;
  if (capability_ < 80) {
    throw std::runtime_error("METAL_EMULATOR_EXECUTOR=cuda: " + name_ + " has compute capability " +
                             std::to_string(major) + "." + std::to_string(minor) +
                             "; 8.0 or newer is needed");
  }
  METAL_EMULATOR_CALL(cuDevicePrimaryCtxRetain, &context_, device);
}

void Device::enter() const {
  static thread_local const Device* current = nullptr;
  if (current == this) return;
  METAL_EMULATOR_CALL(cuCtxSetCurrent, context_);
  current = this;
}

std::shared_ptr<Allocation> allocate_private(const Device& device, std::size_t bytes, bool filled) {
  device.enter();
  Address address = 0;
  if (Driver::get().cuMemAlloc_v2(&address, bytes) != 0) return nullptr;
  auto allocation = std::make_shared<DeviceAllocation>(address, bytes, nullptr, [&device, address] {
    device.enter();
    Driver::get().cuMemFree_v2(address);
  });
  if (filled) {
    METAL_EMULATOR_CALL(cuMemsetD8_v2, address, 0xff, bytes);
    wait_for_default_stream();
  }
  return allocation;
}

std::shared_ptr<Allocation> allocate_shared(const Device& device, std::size_t bytes) {
  return map(device, allocate_guarded(bytes, 0, false));
}

std::shared_ptr<Allocation> wrap(const Device& device, void* memory, std::size_t bytes) {
  auto inner = wrap_memory(memory, bytes, false);
  if (!is_read_only(memory, bytes)) return map(device, std::move(inner));
  auto copy = allocate_private(device, bytes, false);
  if (!copy) return nullptr;
  METAL_EMULATOR_CALL(cuMemcpyHtoD_v2, copy->device_address, memory, bytes);
  wait_for_default_stream();
  // Keeps the copy alive as long as any reference to it.
  return std::make_shared<DeviceAllocation>(copy->device_address, bytes, std::move(inner), [copy] {});
}

}  // namespace metal_emulator::cuda
