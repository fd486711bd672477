#pragma once
// How operators reach a device: its memory seen as tensors of the host, and kernels that its streams run.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "runtime/stream.h"

namespace simdev {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }

// The same memory as a tensor of the host, for a kernel to work on. Keeps nothing alive, as a kernel's pointer does
// not.
at::Tensor on_host(const at::Tensor& tensor);

// Queues a kernel on the current stream of the device. It lasts as long as settings say.
void launch(int device, Work kernel);

// The same for a kernel that draws random numbers; each launch, and each replay in a graph, moves the generator on.
// Without a generator the default generator of the device is used.
using RandomKernel = std::function<void(const at::Generator&)>;
void launch_random(int device, const std::optional<at::Generator>& generator, RandomKernel kernel);

// Runs a kernel on the current stream and waits for it. What it throws reaches the caller and is no fault of the
// device.
void run_and_wait(int device, const Work& kernel);
void run_random_and_wait(int device, const std::optional<at::Generator>& generator, const RandomKernel& kernel);

}  // namespace simdev
