// Copies: within a device, between devices, and between a device and the host, late and at the rate that settings give.

#include <ATen/ops/_foreach_copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "aten/allocator.h"
#include "aten/launch.h"
#include "runtime/device.h"
#include "runtime/event.h"
#include "runtime/host_memory.h"
#include "runtime/settings.h"

namespace simdev {

namespace {

constexpr size_t kPieces = 16;           // in which a copy moves, so that a write in between tears it
constexpr size_t kSmallestPiece = 4096;  // bytes

// Whether two tensors lie in memory alike, whatever the order of their dimensions.
bool lie_alike(const at::Tensor& one, const at::Tensor& other) {
  return (one.is_contiguous() && other.is_contiguous()) ||
         (one.strides() == other.strides() && one.is_non_overlapping_and_dense());
}

bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.is_contiguous() && from.is_contiguous() &&
         to.sizes() == from.sizes() && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

// One copy between a device and the host, as its stream carries it out.
struct Crossing {
  int device;
  bool to_host;
  at::Tensor to, from;  // on the host, both
  const void* host;     // where the host's side begins
  size_t bytes;         // of the host's side
  bool host_waits;

  void operator()() const {
    const double rate = settings().copy_rate;
    const double seconds = rate > 0 ? static_cast<double>(bytes) / rate : 0;
    if (is_plain(to, from)) return move_in_pieces(seconds);
    move(0, bytes, seconds, [this] {
      const at::AutoDispatchBelowADInplaceOrView below;
      at::Tensor(to).copy_(from);
    });
  }

 private:
  void move_in_pieces(double seconds) const {
    const size_t piece = std::max(kSmallestPiece, (bytes + kPieces - 1) / kPieces);
    auto* const target = static_cast<char*>(to.data_ptr());
    const auto* const source = static_cast<const char*>(from.const_data_ptr());
    for (size_t begin = 0; begin < bytes; begin += piece) {
      const size_t size = std::min(piece, bytes - begin);
      const double share = static_cast<double>(size) / static_cast<double>(bytes);
      move(begin, size, seconds * share, [=] { std::memcpy(target + begin, source + begin, size); });
    }
  }

  // While the host waits it keeps the memory; later somebody may have unregistered it.
  void move(size_t begin, size_t size, double seconds, const Work& write) const {
    auto& ours = simdev::device(device);
    ours.use_link(to_host, [&] {
      host_waits ? write() : reach(static_cast<const char*>(host) + begin, size, write);
      ours.pause(seconds);
    });
  }
};

// As CUDA does it: the bits as they are come late, and what they stand for is worked out by the host, which waits for nothing.
void finish_on_host(Crossing crossing, Stream& stream, at::Tensor& self, at::Tensor& (at::Tensor::*finish)() const) {
  crossing.from._set_conj(crossing.to.is_conj());
  crossing.from._set_neg(crossing.to.is_neg());
  stream.push([crossing] { crossing(); });
  (self.*finish)();
}

void copy_across(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  const bool to_host = is_ours(given);
  // As CUDA does it: what does not lie in memory as it is on the other side is put in order on the device, with its memory.
  if (!to_host && !self.is_contiguous() && !lie_alike(self, given)) {
    auto ordered = at::empty(self.sizes(), self.options().memory_format(at::MemoryFormat::Contiguous));
    copy_across(ordered, given, non_blocking);
    self.copy_(ordered);
    return;
  }
  const at::Tensor source = to_host && !lie_alike(self, given) ? given.contiguous() : given;
  const int index = (to_host ? source : self).device().index();
  const at::Tensor& host = to_host ? self : source;
  const bool late = non_blocking && host.is_contiguous() && is_reachable(host.const_data_ptr(), host.nbytes());
  const Crossing crossing{index, to_host, on_host(self), on_host(source), host.const_data_ptr(), host.nbytes(), !late};
  Stream& stream = current_stream(index);
  if (!late) {
    ++counts().blocking_copies;
    stream.push(crossing);
    stream.drain();
    return;
  }
  ++counts().late_copies;
  if (to_host && source.is_conj() != self.is_conj()) return finish_on_host(crossing, stream, self, &at::Tensor::conj_physical_);
  if (to_host && source.is_neg() != self.is_neg()) return finish_on_host(crossing, stream, self, &at::Tensor::neg_);
  const auto kept = is_from_pinned_allocator(host.storage().data_ptr()) ? host.storage() : c10::Storage();
  stream.push([crossing, kept] { crossing(); });
}

// As CUDA does it: on the source's stream, which waits for the target's, which waits for the copy.
void copy_between(at::Tensor& self, const at::Tensor& source) {
  Stream& theirs = current_stream(self.device().index());
  Stream& ours = current_stream(source.device().index());
  Event ready(false), copied(false);
  ready.record(theirs);
  ready.block(ours);
  launch(source.device().index(), [to = on_host(self), from = on_host(source)]() mutable { to.copy_(from); });
  copied.record(ours);
  copied.block(theirs);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  if (self.numel() == 0 || self.is_same(given)) return self;
  const auto source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  if (is_ours(self) != is_ours(source)) {
    copy_across(self, source, non_blocking);
  } else if (self.device() != source.device()) {
    copy_between(self, source);
  } else {
    launch(self.device().index(), [to = on_host(self), from = on_host(source)]() mutable { to.copy_(from); });
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor to = target;
  return copy_(to, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::Tensor to = target;
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_(to, self, false);
}

// Whether CUDA copies these by one kernel of its own: all on one device, of one type, and each pair alike.
bool is_fast(at::TensorList self, at::TensorList source) {
  for (size_t i = 0; i < self.size(); ++i) {
    const bool fits = self[i].device() == self[0].device() && source[i].device() == self[0].device() &&
                      self[i].scalar_type() == self[0].scalar_type() &&
                      source[i].scalar_type() == self[0].scalar_type() && self[i].sizes() == source[i].sizes() &&
                      self[i].strides() == source[i].strides();
    if (!fits) return false;
  }
  return self.size() > 0;
}

// That kernel computes in float where a type is narrower, so what is no number gets other bits; and some types it has not.
void copy_fast(at::TensorList self, at::TensorList source) {
  const auto type = self[0].scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(!at::isBarebonesUnsignedType(type), "\"foreach_tensor_copy\" not implemented for '", type, "'");
  const bool is_narrow = at::isFloatingType(type) && self[0].element_size() < 4;
  for (size_t i = 0; i < self.size(); ++i) {
    launch(self[i].device().index(), [is_narrow, to = on_host(self[i]), from = on_host(source[i])]() mutable {
      to.copy_(is_narrow ? from.to(at::kFloat) : from);
    });
  }
}

void foreach_copy_(at::TensorList self, at::TensorList source, bool non_blocking) {
  TORCH_CHECK(self.size() == source.size(), "lists of ", self.size(), " and ", source.size(), " tensors");
  if (is_fast(self, source)) return copy_fast(self, source);
  for (size_t i = 0; i < self.size(); ++i) {
    at::Tensor to = self[i];
    to.copy_(source[i], non_blocking);
  }
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  at::Scalar value;
  run_and_wait(self.device().index(), [&value, host = on_host(self)] { value = host.item(); });
  return value;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_foreach_copy_", foreach_copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

}  // namespace

}  // namespace simdev
