#pragma once
// The shapes of an operator's results, found out before the numbers are there.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>

namespace simdev {

struct Shapes {
  enum class Told {
    kYes,
    kNo,     // the operator has no code for tensors without memory
    kFailed  // the call is wrong, or its shapes depend on numbers
  };
  Told told = Told::kNo;
  torch::jit::Stack results;    // tensors without memory
  torch::jit::Stack arguments;  // as they are after the call: an `out=` may have another size
};

// Runs the operator on tensors without memory, which checks its arguments too. The same call is answered from memory.
std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op, const torch::jit::Stack& given,
                                        std::optional<size_t> generator_place);

}  // namespace simdev
