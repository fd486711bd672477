#include "aten/allocator.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>

#include "aten/launch.h"
#include "runtime/card.h"
#include "runtime/device.h"
#include "runtime/host_memory.h"
#include "runtime/settings.h"
#include "runtime/memory.h"

namespace simdev {

namespace {

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_device();
    const c10::Device place(kDeviceType, static_cast<c10::DeviceIndex>(index));
    if (bytes == 0) return {nullptr, nullptr, &free_block, place};
    Block* block = memory(index).take(bytes);
    return {block->address, block, &free_block, place};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    launch(current_device(), [=] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override { return any_in_use(); }
  void emptyCache(c10::MempoolId_t) override {
    for (int index = 0; index < num_devices(); ++index) {
      if (in_use(index)) memory(index).empty();
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto* const block = static_cast<Block*>(pointer.get_context());
    if (block) memory(block->device).record(block, stream.id());
  }
  Stats getDeviceStats(c10::DeviceIndex index) override { return memory(index).stats(); }
  void resetAccumulatedStats(c10::DeviceIndex index) override { memory(index).reset_totals(); }
  void resetPeakStats(c10::DeviceIndex index) override { memory(index).reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {  // not in every version of PyTorch
    device(index).check();
    return {card(index).unused(), card(index).total()};
  }
};

struct PinnedBlock {
  void* address;
  size_t bytes;
};

void free_pinned_block(void* context) {
  auto* const block = static_cast<PinnedBlock*>(context);
  free_pinned(block->address, block->bytes);
  delete block;
}

// Caches nothing, and needs no events: a late copy holds what it reads or writes.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(settings().host_memory != HostMemory::kNone, "this device pins no memory of the host");
    const size_t size = std::max<size_t>(bytes, 1);
    void* address = take_pinned(size);
    return {address, new PinnedBlock{address, size}, &free_pinned_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* address, void*, c10::Stream) override { return is_reachable(address, 1); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* const only = new DeviceMemory;
  return only;
}

at::HostAllocator* pinned_allocator() {
  static auto* const only = new PinnedMemory;
  return only;
}

bool is_from_pinned_allocator(const c10::DataPtr& pointer) { return pointer.get_deleter() == &free_pinned_block; }

}  // namespace simdev
