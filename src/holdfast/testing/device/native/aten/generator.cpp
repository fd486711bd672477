#include "aten/generator.h"

#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <vector>

#include "aten/launch.h"
#include "runtime/device.h"

namespace simdev {

namespace {

// Spreads a number over 64 bits (splitmix64, public domain, Sebastiano Vigna).
uint64_t spread(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

constexpr uint64_t kStep = 4;  // CUDA's offsets are multiples of it, and DTensor counts on that

class SeedAndOffset final : public c10::GeneratorImpl {
 public:
  explicit SeedAndOffset(c10::Device device)
      : GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  // Sixteen bytes, as CUDA's: the seed, then the offset.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    const std::array<uint64_t, 2> words{seed_, offset_};
    std::memcpy(state.data_ptr(), words.data(), sizeof(words));
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    std::array<uint64_t, 2> words{};
    TORCH_CHECK(state.is_contiguous() && state.numel() * state.itemsize() == sizeof(words) && state.is_cpu(),
                "the state of a generator is a tensor of 16 bytes on the CPU");
    std::memcpy(words.data(), state.data(), sizeof(words));
    seed_ = words[0];
    offset_ = words[1];
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    seed_ = state->current_seed();
    offset_ = state->get_offset();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override { return clone(); }

  uint64_t draw() {
    const uint64_t drawn = spread(seed_ ^ spread(offset_));
    offset_ += kStep;
    return drawn;
  }

 private:
  SeedAndOffset* clone_impl() const override {
    auto* copy = new SeedAndOffset(device());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<SeedAndOffset>(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)));
}

const at::Generator& default_generator(int device) {
  static auto* const all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int i = 0; i < num_devices(); ++i) generators->push_back(new_generator(i));
    return generators;
  }();
  return all->at(device);
}

uint64_t draw_seed(const at::Generator& generator) {
  auto* const ours = dynamic_cast<SeedAndOffset*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours, "expected a generator of a ", c10::DeviceTypeName(kDeviceType, true), " device, found one of ",
              generator.device());
  const std::lock_guard<std::mutex> lock(ours->mutex_);
  return ours->draw();
}

}  // namespace simdev
