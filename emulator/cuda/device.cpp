#include "device.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>

namespace metal_emulator::cuda {
namespace {

class PrivateAllocation final : public Allocation {
 public:
  PrivateAllocation(const Device& device, Address memory, std::size_t length) : device_(device) {
    device_address = memory;
    bytes = length;
  }
  PrivateAllocation(const PrivateAllocation&) = delete;
  PrivateAllocation& operator=(const PrivateAllocation&) = delete;
  ~PrivateAllocation() override {
    device_.enter();
    Driver::get().cuMemFree_v2(device_address);
  }
  void* host() override { return nullptr; }

 private:
  const Device& device_;
};

// Host memory that is also mapped for the GPU. `inner` owns it.
class MappedAllocation final : public Allocation {
 public:
  MappedAllocation(const Device& device, std::shared_ptr<Allocation> inner, void* registered)
      : device_(device), inner_(std::move(inner)), registered_(registered) {
    bytes = inner_->bytes;
  }
  MappedAllocation(const MappedAllocation&) = delete;
  MappedAllocation& operator=(const MappedAllocation&) = delete;
  ~MappedAllocation() override {
    device_.enter();
    Driver::get().cuMemHostUnregister(registered_);
  }
  void* host() override { return inner_->host(); }
  bool intact() override { return inner_->intact(); }

 private:
  const Device& device_;
  const std::shared_ptr<Allocation> inner_;
  void* const registered_;
};

// Read-only pages and their copy on the device.
class CopiedAllocation final : public Allocation {
 public:
  CopiedAllocation(std::shared_ptr<Allocation> inner, std::shared_ptr<Allocation> copy)
      : inner_(std::move(inner)), copy_(std::move(copy)) {
    bytes = inner_->bytes;
    device_address = copy_->device_address;
  }
  void* host() override { return inner_->host(); }

 private:
  const std::shared_ptr<Allocation> inner_, copy_;
};

// The stream of fills and copies that may continue when their calls return. Other streams do not wait for it.
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
  // Whole pages are mapped.
  auto* first = reinterpret_cast<char*>(page_floor(memory));
  const std::size_t length = page_floor(memory + inner->bytes - 1) - page_floor(memory) +
                             static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (Driver::get().cuMemHostRegister_v2(first, length, kMapped) != 0) return nullptr;
  auto mapped = std::make_shared<MappedAllocation>(device, std::move(inner), first);
  Address address = 0;
  if (Driver::get().cuMemHostGetDevicePointer_v2(&address, first, 0) != 0) return nullptr;
  mapped->device_address = address + static_cast<Address>(memory - first);
  return mapped;
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
  auto allocation = std::make_shared<PrivateAllocation>(device, address, bytes);
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
  return std::make_shared<CopiedAllocation>(std::move(inner), std::move(copy));
}

}  // namespace metal_emulator::cuda
