#pragma once
// Collectives that run on the device: tasks of a stream of their own, as NCCL's kernels are. The host goes on; a peer
// that is missing hangs the device; abort() lets the device go on with whatever is in its memory.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace simdev {

// Wraps a backend of the host, which carries the bytes, and which nobody else may use. Further devices of its ranks
// meet by the store.
c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> carrier,
                                               c10::intrusive_ptr<c10d::Store> store, double timeout_s);

}  // namespace simdev
