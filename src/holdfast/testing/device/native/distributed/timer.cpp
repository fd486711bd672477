// What DistributedDataParallel's log asks: how long parts of a step took. The host's times serve.

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "aten/launch.h"

namespace simdev {

namespace {

class HostTimer final : public c10d::Timer {
 public:
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto begin = getTimestamp(start), finish = getTimestamp(end);
    if (!begin || !finish) return std::nullopt;
    return *finish - *begin;
  }
};

}  // namespace

}  // namespace simdev

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, simdev::kDeviceType, simdev::HostTimer);
}  // namespace c10d
