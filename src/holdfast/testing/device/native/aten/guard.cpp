// What PyTorch asks of a device type: the current device, streams and events.

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "aten/launch.h"
#include "runtime/device.h"
#include "runtime/event.h"
#include "runtime/memory.h"
#include "runtime/process.h"

namespace simdev {

namespace {

c10::Stream as_torch(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)), id);
}

Stream& stream_of(const c10::Stream& stream) { return device(stream.device_index()).stream(stream.id()); }

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices()); }

#if __has_include(<c10/core/DeviceCapability.h>)
  c10::DeviceCapability getDeviceCapability(c10::Device) const { return {}; }  // all types: the host has them
#endif

  c10::Device getDevice() const override { return as_device(current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (index_of(device) < num_devices()) exchange_device(index_of(device));
  }
  c10::Device exchangeDevice(c10::Device device) const override { return as_device(exchange_device(index_of(device))); }

  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return as_torch(index, current_stream_id(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_torch(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = index_of(device);
    return as_torch(index, simdev::device(index).stream_of_pool().id());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_torch(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return stream_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { stream_of(stream).drain(); }
  bool isStreamCapturing(const c10::Stream& stream) const {  // not in every version of PyTorch
    return stream_of(stream).capture() != nullptr;
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const int asked = index < 0 ? current_device() : index;
    if (in_use(asked)) device(asked).synchronize();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (!*event) *event = new Event(flag != c10::EventFlag::PYTORCH_DEFAULT);
    static_cast<Event*>(*event)->record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) static_cast<Event*>(event)->block(stream_of(stream));
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->synchronize();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "both events must be recorded before their time is asked for");
    return static_cast<Event*>(begin)->milliseconds_until(*static_cast<Event*>(end));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    auto* const block = static_cast<Block*>(pointer.get_context());
    if (block) memory(block->device).record(block, stream.id());
  }

 private:
  static c10::Device as_device(int index) { return {kDeviceType, static_cast<c10::DeviceIndex>(index)}; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace simdev
