// Autocast: the same operators run in lower precision, or in float32, as on other devices.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace simdev {

namespace {

using namespace at;            // NOLINT: the macros below name what is in it
using namespace at::autocast;  // NOLINT

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIMDEV_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMDEV_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMDEV_FP32_SET_TYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMDEV_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIMDEV_LOWER)
  AT_FORALL_FP32(SIMDEV_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMDEV_FP32_SET_TYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIMDEV_PROMOTE)
#undef SIMDEV_LOWER
#undef SIMDEV_FP32
#undef SIMDEV_FP32_SET_TYPE
#undef SIMDEV_PROMOTE
}

}  // namespace

}  // namespace simdev
