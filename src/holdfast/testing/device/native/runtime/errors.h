#pragma once
// The errors of a device, as the classes that PyTorch has for them.

#include <c10/util/Exception.h>

#include <string>

namespace simdev {

// torch.AcceleratorError, what CUDA's errors are: code 710 is an assertion in a kernel.
[[noreturn]] void throw_fault(const std::string& why);

// torch.OutOfMemoryError.
[[noreturn]] void throw_out_of_memory(int device, size_t wanted, size_t unused, size_t total);

// What an error says, without the frames that led to it.
std::string brief(const std::exception& error);

}  // namespace simdev
