#pragma once
// One way for all operators that have no code of their own here.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace simdev {

// Runs an operator of the CPU on the memory of a device, late if its shapes are known without its numbers.
void call_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace simdev
