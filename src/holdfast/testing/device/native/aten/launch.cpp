#include "aten/launch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <exception>

#include "aten/generator.h"
#include "runtime/device.h"
#include "runtime/settings.h"

namespace simdev {

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  void* address = tensor.numel() > 0 ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto host = at::from_blob(address, tensor.sizes(), tensor.strides(), [](void*) {}, options);
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

namespace {

// What a kernel is on a stream: no gradients, and the time that it takes.
Work timed(int device, Work kernel) {
  return [device, kernel = std::move(kernel)] {
    simdev::device(device).pause(settings().kernel_time);
    const at::AutoDispatchBelowADInplaceOrView below;
    kernel();
  };
}

at::Generator host_generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

}  // namespace

void launch(int device, Work kernel) {
  ++counts().queued;
  current_stream(device).push(timed(device, std::move(kernel)));
}

void launch_random(int device, const std::optional<at::Generator>& generator, RandomKernel kernel) {
  ++counts().queued;
  const auto source = generator && generator->defined() ? *generator : default_generator(device);
  current_stream(device).push_made([device, source, kernel = std::move(kernel)]() -> Work {
    const uint64_t seed = draw_seed(source);
    return timed(device, [kernel, seed] { kernel(host_generator(seed)); });
  });
}

void run_and_wait(int device, const Work& kernel) {
  ++counts().waited;
  const auto thrown = std::make_shared<std::exception_ptr>();
  Stream& stream = current_stream(device);
  stream.push(timed(device, [kernel, thrown] {
    try {
      kernel();
    } catch (...) {
      *thrown = std::current_exception();
    }
  }));
  stream.drain();
  if (*thrown) std::rethrow_exception(*thrown);
}

void run_random_and_wait(int device, const std::optional<at::Generator>& generator, const RandomKernel& kernel) {
  const auto source = generator && generator->defined() ? *generator : default_generator(device);
  const uint64_t seed = draw_seed(source);
  run_and_wait(device, [kernel, seed] { kernel(host_generator(seed)); });
}

}  // namespace simdev
