#include "runtime/device.h"

#include <c10/util/Exception.h>

#include <array>
#include <chrono>

#include "runtime/card.h"
#include "runtime/errors.h"
#include "runtime/process.h"
#include "runtime/settings.h"

namespace simdev {

namespace {

constexpr int kMostDevices = 64;
constexpr int64_t kPool = 32;

// Never destroyed: the threads of streams may outlive static objects.
struct Registry {
  std::mutex mutex;
  std::array<std::atomic<Device*>, kMostDevices> devices{};
};

Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

thread_local int t_device = 0;
thread_local std::array<int64_t, kMostDevices> t_stream{};

void check_index(int index) {
  TORCH_CHECK(index >= 0 && index < num_devices(), "invalid device ordinal: ", index, " of ", num_devices(), " ",
              settings().name, " devices");
}

}  // namespace

Device::Device(int index) : index_(index) {
  for (int64_t id = 0; id <= kPool; ++id) streams_.push_back(std::make_unique<Stream>(*this, id));
}

Stream& Device::stream(int64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return *streams_.at(id);
}

Stream& Device::stream_of_pool() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return *streams_.at(1 + num_given_++ % kPool);
}

Stream& Device::lend_stream() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!unused_.empty()) {
    Stream* stream = unused_.back();
    unused_.pop_back();
    return *stream;
  }
  streams_.push_back(std::make_unique<Stream>(*this, static_cast<int64_t>(streams_.size())));
  return *streams_.back();
}

void Device::take_back(Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  unused_.push_back(&stream);
}

std::vector<Stream*> Device::streams() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Stream*> all;
  for (const auto& stream : streams_) all.push_back(stream.get());
  return all;
}

void Device::synchronize() {
  for (Stream* stream : streams()) stream->drain();
}

void Device::check() const {
  check_process();
  if (const auto problem = fault()) throw_fault(problem->why);
}

void Device::fail(const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!fault_) fault_ = std::make_shared<Problem>(why);
  }
  changed_.notify_all();
}

ProblemPtr Device::fault() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return fault_;
}

void Device::pause(double seconds) {
  if (seconds <= 0) return;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!fault_ && !stopping()) {
    const auto left = end - std::chrono::steady_clock::now();
    if (left <= left.zero()) return;
    changed_.wait_for(lock, std::min<std::chrono::duration<double>>(left, std::chrono::milliseconds(100)));
  }
}

bool Device::wait_until(const std::function<bool()>& done) {
  const Pauses pauses(std::chrono::milliseconds(1));
  while (!done()) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (fault_ || stopping()) return false;
    changed_.wait_for(lock, pauses.next());
  }
  return true;
}

void Device::use_link(bool to_host, const std::function<void()>& move) {
  const std::lock_guard<std::mutex> lock(to_host ? link_to_host_ : link_from_host_);
  move();
}

void Device::hang(Stream& stream) {
  uint64_t ticket = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ticket = ++num_hung_;
  }
  stream.push([this, ticket] {
    wait_until([this, ticket] {
      const std::lock_guard<std::mutex> lock(mutex_);
      return num_freed_ >= ticket;
    });
  });
}

void Device::free() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_freed_ = num_hung_;
  }
  changed_.notify_all();
}

Device& device(int index) {
  check_index(index);
  auto& place = registry().devices[index];
  if (Device* known = place.load()) return *known;
  check_process();
  const std::lock_guard<std::mutex> lock(registry().mutex);
  if (!place.load()) {
    watch_forks();
    card(index).take_context();
    place = new Device(index);
  }
  return *place.load();
}

bool in_use(int index) { return index >= 0 && index < num_devices() && registry().devices[index].load() != nullptr; }

bool any_in_use() {
  for (int index = 0; index < num_devices(); ++index) {
    if (in_use(index)) return true;
  }
  return false;
}

int num_devices() { return std::min(settings().num_devices, kMostDevices); }

int current_device() { return t_device; }

int exchange_device(int index) {
  check_index(index);
  return std::exchange(t_device, index);
}

Stream& current_stream(int index) { return device(index).stream(t_stream.at(index)); }

int64_t exchange_stream(int index, int64_t id) { return std::exchange(t_stream.at(index), id); }

int64_t current_stream_id(int index) { return t_stream.at(index); }

}  // namespace simdev
