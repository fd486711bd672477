#include "aten/shapes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>

#include <mutex>
#include <string>
#include <unordered_map>

#include "aten/values.h"

namespace simdev {

namespace {

using c10::IValue;

constexpr size_t kMostAnswers = 8192;  // then all are forgotten

// All that the shapes of a call depend on, as bytes. Numbers like a learning rate are not among it.
class CallKey {
 public:
  CallKey(const c10::OperatorHandle& op, const torch::jit::Stack& given) {
    add(reinterpret_cast<intptr_t>(&op.schema()));
    add(static_cast<int64_t>(at::get_default_dtype_as_scalartype()));
    const auto& arguments = op.schema().arguments();
    bool has_input = false;
    for (size_t i = 0; i < given.size(); ++i) has_input |= !arguments[i].is_out() && given[i].isTensor();
    for (size_t i = 0; i < given.size(); ++i) add(given[i], has_input && is_number(arguments[i]));
  }

  // Whether two calls with this key have the same shapes.
  bool is_complete() const { return is_complete_; }
  const std::string& bytes() const { return bytes_; }

 private:
  static bool is_number(const c10::Argument& argument) {
    const auto kind = argument.type()->kind();
    return kind == c10::TypeKind::NumberType || kind == c10::TypeKind::FloatType;
  }

  void add(int64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }

  void add(c10::IntArrayRef numbers) {
    add(static_cast<int64_t>(numbers.size()));
    for (const int64_t number : numbers) add(number);
  }

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return add(-1);
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(static_cast<int64_t>(tensor.device().type()));
    add(tensor.sizes());
    add(tensor.strides());
  }

  void add(const IValue& value, bool only_kind) {
    bytes_.push_back(value.isNone()     ? 'n'
                     : value.isTensor() ? 't'
                     : value.isInt()    ? 'i'
                     : value.isDouble() ? 'd'
                     : value.isBool()   ? 'b'
                                        : 'o');
    if (only_kind || value.isNone() || value.isGenerator()) return;
    if (value.isTensor()) return add(value.toTensor());
    if (value.isInt()) return add(value.toInt());
    if (value.isBool()) return add(static_cast<int64_t>(value.toBool()));
    if (value.isIntList()) return add(c10::IntArrayRef(value.toIntVector()));
    if (value.isDouble()) {
      const double number = value.toDouble();
      bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
      return;
    }
    if (value.isTensorList()) {
      const auto tensors = value.toTensorVector();
      add(static_cast<int64_t>(tensors.size()));
      for (const at::Tensor& tensor : tensors) add(tensor);
      return;
    }
    if (value.isDevice()) return add(static_cast<int64_t>(value.toDevice().type()));
    is_complete_ = false;
  }

  std::string bytes_;
  bool is_complete_ = true;
};

// Mean and deviation of a normalization have the type of the input on the CPU, unless its weights have another one; on the
// devices that PyTorch asks without memory they are always float.
void give_types_of_the_cpu(const c10::OperatorHandle& op, const torch::jit::Stack& given, Shapes& shapes) {
  const auto& name = op.schema().name();
  if (name != "aten::native_layer_norm" && name != "aten::native_group_norm") return;
  const auto type = given[0].toTensor().scalar_type();
  for (const IValue& value : given) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() != type) return;
  }
  for (const size_t i : {1, 2}) shapes.results[i] = IValue(shapes.results[i].toTensor().to(type));
}

Shapes ask(const c10::OperatorHandle& op, const torch::jit::Stack& given, std::optional<size_t> generator_place) {
  Shapes shapes;
  for (const IValue& value : given) {
    IValue shape = mapped(value, [](const at::Tensor& tensor) {
      const auto options = tensor.options().device(at::kMeta).pinned_memory(false);
      return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    });
    shapes.arguments.push_back(shape.isDevice() ? IValue(c10::Device(at::kMeta)) : shape);
  }
  shapes.results = shapes.arguments;
  if (generator_place) shapes.results[*generator_place] = IValue();
  try {
    const at::AutoDispatchBelowAutograd below;
    op.callBoxed(&shapes.results);
    give_types_of_the_cpu(op, given, shapes);
    shapes.told = Shapes::Told::kYes;
  } catch (const c10::NotImplementedError&) {
    shapes.told = Shapes::Told::kNo;
  } catch (const std::exception&) {
    shapes.told = Shapes::Told::kFailed;
  }
  return shapes;
}

struct Answers {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const Shapes>> by_call;
};

Answers& answers() {
  static auto* const all = new Answers;
  return *all;
}

}  // namespace

std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op, const torch::jit::Stack& given,
                                        std::optional<size_t> generator_place) {
  const CallKey key(op, given);
  if (!key.is_complete()) return std::make_shared<const Shapes>(ask(op, given, generator_place));
  {
    const std::lock_guard<std::mutex> lock(answers().mutex);
    const auto known = answers().by_call.find(key.bytes());
    if (known != answers().by_call.end()) return known->second;
  }
  auto shapes = std::make_shared<const Shapes>(ask(op, given, generator_place));
  const std::lock_guard<std::mutex> lock(answers().mutex);
  if (answers().by_call.size() >= kMostAnswers) answers().by_call.clear();
  answers().by_call[key.bytes()] = shapes;
  return shapes;
}

}  // namespace simdev
