#pragma once
// Generators of random numbers: a seed and how often it was drawn from, kept on the host as CUDA's are.

#include <ATen/core/Generator.h>

namespace simdev {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// The seed of one kernel; the generator moves on.
uint64_t draw_seed(const at::Generator& generator);

}  // namespace simdev
