// Attention as one operator, which DTensor asks for: it takes apart no tensors that only some devices make, as the mask of a
// causal attention. It has the name and the arguments of the "efficient" one of CUDA, and the CPU's code.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "aten/launch.h"
#include "aten/operators.h"

namespace simdev {

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Rows of the sums are padded, as on CUDA: PyTorch says so of this operator without asking a device.
constexpr int64_t kPadding = 32;

// What has a mask, drops out or is of another kind is made of operators that are there.
bool fits(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask, double dropout,
          bool groups) {
  return query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && !groups && dropout == 0 && !mask &&
         at::isFloatingType(query.scalar_type()) && query.scalar_type() == key.scalar_type() &&
         query.scalar_type() == value.scalar_type() && query.numel() > 0 && key.numel() > 0 &&
         query.size(1) == key.size(1) && key.size(1) == value.size(1) && query.size(3) == key.size(3) &&
         key.size(3) == value.size(3) && at::globalContext().userEnabledMemEfficientSDP();
}

int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask, double dropout,
               bool, std::optional<double>, bool groups) {
  const auto found =
      fits(query, key, value, mask, dropout, groups) ? at::SDPBackend::efficient_attention : at::SDPBackend::math;
  return static_cast<int64_t>(found);
}

int64_t padded(int64_t rows) { return (rows + kPadding - 1) / kPadding * kPadding; }

// Returns the output, the logarithms of the sums (batch, heads, padded rows) and two numbers that only dropout needs.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const MaybeTensor& bias, bool with_sums, double dropout,
                                                     bool is_causal, std::optional<double> scale) {
  TORCH_CHECK_NOT_IMPLEMENTED(!bias && dropout == 0,
                              "attention with a mask or dropout has no code for simulated devices");
  const int64_t rows = query.size(2);
  auto output = at::empty({query.size(0), rows, query.size(1), value.size(3)}, query.options()).transpose(1, 2);
  const auto kind = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto sums = at::zeros({query.size(0), query.size(1), with_sums ? padded(rows) : 0}, query.options().dtype(kind));
  launch(query.device().index(), [=, q = on_host(query), k = on_host(key), v = on_host(value), out = on_host(output),
                                  told = on_host(sums)]() mutable {
    const auto [computed, logs] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, {}, scale);
    out.copy_(computed);
    if (with_sums) told.narrow(2, 0, rows).copy_(logs);
  });
  const auto none = at::zeros({}, query.options().dtype(at::kLong));
  return {output, sums, none, none.clone()};
}

// Returns gradients of query, key and value, and none of a mask.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&, const Tensor& output,
    const Tensor& sums, const Tensor&, const Tensor&, double, std::array<bool, 4>, bool is_causal,
    std::optional<double> scale) {
  if (!grad.defined()) return {};
  auto of_query = at::empty_like(query), of_key = at::empty_like(key), of_value = at::empty_like(value);
  launch(query.device().index(),
         [=, g = on_host(grad), q = on_host(query), k = on_host(key), v = on_host(value), out = on_host(output),
          logs = on_host(sums), gq = on_host(of_query), gk = on_host(of_key), gv = on_host(of_value)]() mutable {
           const auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
               g, q, k, v, out, logs.narrow(2, 0, q.size(2)), 0.0, is_causal, {}, scale);
           gq.copy_(a);
           gk.copy_(b);
           gv.copy_(c);
         });
  return {of_query, of_key, of_value, Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", choose);
  m.impl("_scaled_dot_product_efficient_attention", attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", attention_backward);
}

}  // namespace

int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool groups) {
  return choose(query, key, value, mask, dropout, is_causal, scale, groups);
}

}  // namespace simdev

namespace at::native {

// Asked first, for a DTensor too.
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simdev::choose_attention);

}  // namespace at::native
