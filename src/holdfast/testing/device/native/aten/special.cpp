// Operators that PyTorch asks of a device under names that the CPU does not have.

#include <ATen/ops/bernoulli.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include "aten/launch.h"
#include "aten/operators.h"

namespace simdev {

namespace {

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  call_operator(op, stack);
}

// The CPU's operator is told the shape of the bias besides: one number for each channel of the output.
void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto first = stack->end() - 10;  // grad_output, input, weight, then what describes the convolution
  const int64_t channels = first->toTensor().size(1);
  stack->insert(first + 3, c10::IValue(c10::List<int64_t>({channels})));
  call_operator(op, stack);
}

// The fused form of dropout has no generator among its arguments.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const bool drops = train.value_or(true) && p > 0;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  auto output = at::empty_like(input);
  const double scale = p < 1 ? 1 / (1 - p) : 0;
  launch_random(
      input.device().index(), std::nullopt,
      [=, in = on_host(input), out = on_host(output), kept = on_host(mask)](const at::Generator& seeded) mutable {
        if (!drops) {
          kept.fill_(true);
          out.copy_(in);
          return;
        }
        kept.bernoulli_(1 - p, seeded);
        out.copy_(at::mul(in, kept).mul_(scale));
      });
  return {output, mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // PyTorch's way around a device that has none keeps their statistics in a type that the CPU's backward does not take.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&call_operator>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&call_operator>());
  m.impl("native_dropout", native_dropout);
}

}  // namespace

}  // namespace simdev
