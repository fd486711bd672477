#pragma once
// What a collective returns: streams wait for it, the host only where it must.

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

#include "aten/launch.h"
#include "runtime/device.h"
#include "runtime/event.h"

namespace simdev {

class CollectiveWork final : public c10d::Work {
 public:
  // `host_waits`: a barrier, whose wait() is the host's. `results`: what the future gives.
  CollectiveWork(c10d::OpType kind, int rank, Stream& stream, std::vector<at::Tensor> results, bool host_waits);

  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return end_.query(); }
  void synchronize() override { end_.block(current_stream(device_)); }
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return results_; }

 private:
  const int device_;
  const std::vector<at::Tensor> results_;
  const bool host_waits_;
  Event end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace simdev
