// The cells of LSTM and GRU, which PyTorch asks of a device as fused operators and the CPU does not have. The formulas
// are those of aten/src/ATen/native/cuda/RNN.cu, written with operators that are there.

#include <ATen/ATen.h>
#include <torch/library.h>

namespace simdev {

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// Inputs of shape (batch, 4 * hidden). Returns the new hidden and cell state, and the gates i, f, g, o after
// activation.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

// Returns gradients of the gates, of the cell state, and of a bias.
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hy, const MaybeTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const auto tanh_cy = cy.tanh();
  const auto of_hidden = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cx);
  const auto of_output = grad_cy && grad_cy->defined() ? *grad_cy : at::zeros_like(cx);
  const auto of_cell = of_output + of_hidden * o * (1 - tanh_cy * tanh_cy);
  const auto grad_gates = at::cat({of_cell * g * i * (1 - i), of_cell * cx * f * (1 - f), of_cell * i * (1 - g * g),
                                   of_hidden * tanh_cy * o * (1 - o)},
                                  1);
  return {grad_gates, of_cell * f, has_bias ? grad_gates.sum(0) : Tensor()};
}

// Inputs of shape (batch, 3 * hidden). Returns the new hidden state, and what the backward needs: r, z, n, hx, hn.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto r = (in[0] + hidden[0]).sigmoid(), z = (in[1] + hidden[1]).sigmoid();
  const auto n = (in[2] + r * hidden[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, hidden[2]}, 1)};
}

// Returns gradients of both kinds of gates, of the hidden state, and of both biases.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto kept = workspace.chunk(5, 1);
  const auto &r = kept[0], &z = kept[1], &n = kept[2], &hx = kept[3], &hn = kept[4];
  const auto of_z = grad_hy * (hx - n) * (1 - z) * z;
  const auto of_n = grad_hy * (1 - z) * (1 - n * n);
  const auto of_r = of_n * hn * (1 - r) * r;
  const auto of_input = at::cat({of_r, of_z, of_n}, 1), of_hidden = at::cat({of_r, of_z, of_n * r}, 1);
  return {of_input, of_hidden, grad_hy * z, has_bias ? of_input.sum(0) : Tensor(),
          has_bias ? of_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace

}  // namespace simdev
