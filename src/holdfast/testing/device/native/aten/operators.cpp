#include "aten/operators.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "aten/launch.h"
#include "aten/shapes.h"
#include "aten/values.h"
#include "runtime/device.h"

namespace simdev {

namespace {

using c10::IValue;
using Tensors = std::vector<at::Tensor>;

// These take tensors of the host beside tensors of a device, also on real devices.
bool takes_host_tensors(std::string_view name) {
  constexpr std::array<std::string_view, 8> names{"aten::index",
                                                  "aten::index_put_",
                                                  "aten::_index_put_impl_",
                                                  "aten::_unsafe_index",
                                                  "aten::_pack_padded_sequence",
                                                  "aten::_ctc_loss",
                                                  "aten::_ctc_loss_backward",
                                                  "aten::nonzero_static"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Their results have other shapes on the CPU than on the devices that PyTorch asks without memory.
bool has_shapes_of_its_own(std::string_view name) {
  constexpr std::array<std::string_view, 3> names{"aten::_embedding_bag", "aten::_embedding_bag_forward_only",
                                                  "aten::linalg_lstsq"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// A return that is one of the arguments, which was written to: the place of that argument.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (!result.alias_info()) return std::nullopt;
  TORCH_CHECK_NOT_IMPLEMENTED(result.alias_info()->isWrite(), schema.name(),
                              " returns a view of its argument and has no code for simulated devices");
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) return i;
  }
  return std::nullopt;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : op_(op),
        schema_(op.schema()),
        given_(stack.end() - static_cast<long>(schema_.arguments().size()), stack.end()) {
    TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), schema_.name(),
                                " has no code for the CPU, and therefore none for simulated devices");
    find_device();
    take_to_host();
  }

  torch::jit::Stack run() {
    const c10::DeviceGuard guard(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device_)));
    if (!returns_tensors_only() || has_shapes_of_its_own(schema_.name())) return run_now();
    shapes_ = shapes_of(op_, given_, generator_place_);
    switch (shapes_->told) {
      case Shapes::Told::kYes:
        return run_late();
      case Shapes::Told::kNo:
        return returns_arguments_only() ? run_late() : run_now();
      default:
        return run_now();  // what is wrong with the call, if anything, is told to the caller
    }
  }

 private:
  void find_device() {
    std::optional<int> found;
    for (const IValue& value : given_) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (!is_ours(tensor)) return;
        TORCH_CHECK(!found || *found == tensor.device().index(),
                    "Expected all tensors to be on the same device, but found at "
                    "least two devices, ",
                    c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(*found)), " and ", tensor.device(), " (",
                    schema_.name(), ")");
        found = tensor.device().index();
      });
      if (!found && value.isDevice() && value.toDevice().type() == kDeviceType && value.toDevice().has_index()) {
        found = value.toDevice().index();
      }
    }
    device_ = found.value_or(current_device());
  }

  void take_to_host() {
    const bool takes_any = takes_host_tensors(schema_.name());
    for (size_t i = 0; i < given_.size(); ++i) {
      if (is_generator(schema_.arguments()[i])) {
        generator_place_ = i;
        if (given_[i].isGenerator()) generator_ = given_[i].toGenerator();
      }
      TORCH_CHECK_NOT_IMPLEMENTED(!given_[i].isStorage(), schema_.name(), " has no code for simulated devices");
      IValue value = mapped(given_[i], [&](const at::Tensor& tensor) {
        if (is_ours(tensor)) return on_host(tensor);
        TORCH_CHECK(tensor.dim() == 0 || takes_any,
                    "Expected all tensors to be on the same device, but found at least two "
                    "devices, ",
                    c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device_)), " and ", tensor.device(), " (",
                    schema_.name(), ")");
        return tensor.clone();  // its value now; the host may change it while the kernel waits
      });
      host_.push_back(value.isDevice() ? IValue(c10::Device(at::kCPU)) : value);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(generator_place_ || !op_.hasTag(at::Tag::nondeterministic_seeded), schema_.name(),
                                " draws random numbers without a generator and has no code for simulated devices");
  }

  bool returns_tensors_only() const {
    for (const auto& result : schema_.returns()) {
      const auto kind = result.type()->kind();
      const bool is_list =
          kind == c10::TypeKind::ListType &&
          result.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
      if (kind != c10::TypeKind::TensorType && !is_list) return false;
    }
    return true;
  }

  bool returns_arguments_only() const {
    for (const auto& result : schema_.returns()) {
      if (!written_argument(schema_, result)) return false;
    }
    return true;
  }

  torch::jit::Stack run_late() {
    torch::jit::Stack results;
    std::vector<Tensors> fresh;  // for each return; none for those that are arguments
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      if (const auto place = written_argument(schema_, schema_.returns()[i])) {
        resize_as_told(*place);
        results.push_back(given_[*place]);
        fresh.emplace_back();
        continue;
      }
      results.push_back(mapped(shapes_->results.at(i), [this](const at::Tensor& shape) { return fresh_like(shape); }));
      fresh.push_back(hosts_of(results.back()));
    }
    if (generator_place_) {
      launch_random(device_, generator_,
                    [op = op_, host = host_, fresh, place = *generator_place_](const at::Generator& seeded) {
                      auto stack = host;
                      stack[place] = IValue(seeded);
                      call_and_fill(op, stack, fresh);
                    });
    } else {
      launch(device_, [op = op_, host = host_, fresh] {
        auto stack = host;
        call_and_fill(op, stack, fresh);
      });
    }
    return results;
  }

  static Tensors hosts_of(const IValue& result) {
    if (result.isTensor()) return {result.toTensor().defined() ? on_host(result.toTensor()) : at::Tensor()};
    Tensors all;
    for (const at::Tensor& tensor : result.toTensorVector()) all.push_back(tensor.defined() ? on_host(tensor) : tensor);
    return all;
  }

  static void call_and_fill(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                            const std::vector<Tensors>& fresh) {
    call_with_outputs(op, stack);
    for (size_t i = 0; i < fresh.size(); ++i) {
      if (fresh[i].empty()) continue;
      const Tensors computed = stack[i].isTensor() ? Tensors{stack[i].toTensor()} : stack[i].toTensorVector();
      for (size_t k = 0; k < computed.size(); ++k) {
        // Where the CPU says by an empty tensor that it has nothing to tell, other devices may have room for it.
        const bool is_told = computed[k].defined() && computed[k].numel() > 0;
        if (is_told && fresh[i].at(k).defined()) at::Tensor(fresh[i][k]).copy_(computed[k]);
      }
    }
  }

  // Kernels of the CPU may give an `out=` another size for a while, and other memory with it.
  static void call_with_outputs(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    const auto& arguments = op.schema().arguments();
    std::vector<std::pair<at::Tensor, at::Tensor>> outputs;  // what the kernel is given, and where it belongs
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!arguments[i].is_out() || !stack[i].isTensor()) continue;
      outputs.emplace_back(resizable(stack[i].toTensor()), stack[i].toTensor());
      stack[i] = IValue(outputs.back().first);
    }
    op.callBoxed(&stack);
    for (auto& [written, target] : outputs) {
      if (written.numel() > 0 && written.const_data_ptr() != target.const_data_ptr()) target.copy_(written);
    }
  }

  static at::Tensor resizable(const at::Tensor& host) {
    return at::for_blob(host.data_ptr(), host.sizes())
        .strides(host.strides())
        .options(host.options())
        .allocator(c10::GetCPUAllocator())
        .resizeable_storage()
        .make_tensor();
  }

  at::Tensor fresh_like(const at::Tensor& shape) const {
    const auto options = shape.options().device(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device_)));
    return at::empty_strided(shape.sizes(), shape.strides(), options);
  }

  // An `out=` of another size takes the size of the result.
  void resize_as_told(size_t place) {
    if (!given_[place].isTensor() || !shapes_->arguments.at(place).isTensor()) return;
    const auto told = shapes_->arguments[place].toTensor();
    const auto target = given_[place].toTensor();
    if (!told.defined() || told.sizes() == target.sizes()) return;
    target.resize_(told.sizes());
    host_[place] = IValue(on_host(target));
  }

  // Waits: for numbers that the host asks for, for shapes that depend on numbers.
  torch::jit::Stack run_now() {
    auto stack = host_;
    for (size_t i = 0; i < host_.size(); ++i) {
      if (is_empty_output(i)) stack[i] = IValue(at::empty_strided({0}, {1}, host_[i].toTensor().options()));
    }
    const auto arguments = stack;
    if (generator_place_) {
      run_random_and_wait(device_, generator_, [&](const at::Generator& seeded) {
        stack[*generator_place_] = IValue(seeded);
        op_.callBoxed(&stack);
      });
    } else {
      run_and_wait(device_, [&] { op_.callBoxed(&stack); });
    }
    torch::jit::Stack results;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      if (const auto place = written_argument(schema_, schema_.returns()[i])) {
        if (is_empty_output(*place))
          given_[*place].toTensor().resize_(arguments[*place].toTensor().sizes()).copy_(arguments[*place].toTensor());
        results.push_back(given_[*place]);
      } else {
        results.push_back(
            mapped(stack.at(i), [this](const at::Tensor& computed) { return fresh_like(computed).copy_(computed); }));
      }
    }
    return results;
  }

  bool is_empty_output(size_t place) const {
    const auto& value = given_[place];
    return schema_.arguments()[place].is_out() && value.isTensor() && value.toTensor().defined() &&
           value.toTensor().numel() == 0;
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const std::vector<IValue> given_;
  torch::jit::Stack host_;  // the arguments as the kernel sees them
  std::shared_ptr<const Shapes> shapes_;
  int device_ = 0;
  std::optional<size_t> generator_place_;
  std::optional<at::Generator> generator_;
};

}  // namespace

void call_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto results = Call(op, *stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_operator>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace simdev
