#pragma once
// Tensors inside the arguments of an operator.

#include <ATen/core/ivalue.h>

#include <optional>

namespace simdev {

// The value with `change` applied to each tensor in it.
template <class Change>
c10::IValue mapped(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector())
      changed.push_back(tensor.defined() ? change(tensor) : tensor);
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    }
    return changed;
  }
  return value;
}

template <class Look>
void each_tensor(const c10::IValue& value, const Look& look) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) look(value.toTensor());
    return;
  }
  if (!value.isTensorList() && !value.isOptionalTensorList()) return;
  mapped(value, [&look](const at::Tensor& tensor) {
    look(tensor);
    return tensor;
  });
}

}  // namespace simdev
