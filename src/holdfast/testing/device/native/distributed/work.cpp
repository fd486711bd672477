#include "distributed/work.h"

#include <c10/core/StreamGuard.h>

namespace simdev {

CollectiveWork::CollectiveWork(c10d::OpType kind, int rank, Stream& stream, std::vector<at::Tensor> results,
                               bool host_waits)
    : Work(rank, kind),
      device_(stream.device().index()),
      results_(std::move(results)),
      host_waits_(host_waits),
      end_(true) {
  end_.record(stream);
  const c10::Device place(kDeviceType, static_cast<c10::DeviceIndex>(device_));
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{place});
  const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, place, stream.id()));
  future_->markCompleted(c10::IValue(results_));  // complete for the host; its events are the stream's
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (timeout != kNoTimeout) {
    const double seconds = std::chrono::duration<double>(timeout).count();
    TORCH_CHECK_WITH(DistBackendError, end_.synchronize_within(seconds), c10d::opTypeToString(retrieveOpType()),
                     " took longer than ", seconds, " s");
  } else if (host_waits_) {
    end_.synchronize();
  }
  return true;
}

}  // namespace simdev
