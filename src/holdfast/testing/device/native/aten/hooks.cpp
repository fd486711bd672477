#include "aten/hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <mutex>

#include "aten/allocator.h"
#include "aten/generator.h"
#include "aten/graphs.h"
#include "aten/launch.h"
#include "runtime/device.h"
#include "runtime/host_memory.h"
#include "runtime/process.h"

namespace simdev {

namespace {

int index_or_current(c10::DeviceIndex index) { return index < 0 ? current_device() : index; }

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  void init() const override { check_process(); }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return in_use(index); }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(index_or_current(index)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Device getDeviceFromPtr(void*) const override {
    return {kDeviceType, static_cast<c10::DeviceIndex>(current_device())};
  }

  bool isPinnedPtr(const void* address) const override { return is_reachable(address, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index_or_current(index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index_or_current(index));
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* const impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto fresh = device_allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, impl->nbytes());
    if (kept > 0) device_allocator()->copy_data(fresh.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

}  // namespace

void register_with_torch() {
  static std::once_flag once;
  std::call_once(once, [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    c10::SetAllocator(kDeviceType, device_allocator());
    at::setHostAllocator(kDeviceType, pinned_allocator());
    register_graphs();
  });
}

}  // namespace simdev
