#include "runtime/host_memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <map>
#include <mutex>
#include <shared_mutex>

namespace simdev {

namespace {

struct Ranges {
  std::shared_mutex mutex;
  std::map<uintptr_t, size_t> by_address;
};

Ranges& ranges() {
  static auto* const all = new Ranges;
  return *all;
}

bool contains(const Ranges& all, const void* address, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(address);
  auto next = all.by_address.upper_bound(first);
  if (next == all.by_address.begin()) return false;
  const auto& [begin, size] = *--next;
  return first + bytes <= begin + size;
}

}  // namespace

bool register_host(uintptr_t address, size_t bytes) {
  auto& all = ranges();
  const std::unique_lock<std::shared_mutex> lock(all.mutex);
  for (const auto& [begin, size] : all.by_address) {
    if (address < begin + size && begin < address + bytes) return false;
  }
  all.by_address[address] = bytes;
  return true;
}

bool unregister_host(uintptr_t address) {
  auto& all = ranges();
  const std::unique_lock<std::shared_mutex> lock(all.mutex);
  return all.by_address.erase(address) > 0;
}

bool is_reachable(const void* address, size_t bytes) {
  auto& all = ranges();
  const std::shared_lock<std::shared_mutex> lock(all.mutex);
  return contains(all, address, bytes);
}

void reach(const void* address, size_t bytes, const std::function<void()>& touch) {
  auto& all = ranges();
  const std::shared_lock<std::shared_mutex> lock(all.mutex);
  TORCH_CHECK(contains(all, address, bytes), "an illegal memory access: ", bytes, " bytes of the host at ", address,
              " were unregistered while a copy of them was queued");
  touch();
}

void* take_pinned(size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "the host has no memory left to pin ", bytes, " bytes");
  register_host(reinterpret_cast<uintptr_t>(address), bytes);
  return address;
}

void free_pinned(void* address, size_t bytes) {
  unregister_host(reinterpret_cast<uintptr_t>(address));
  munmap(address, bytes);
}

size_t num_registered() {
  auto& all = ranges();
  const std::shared_lock<std::shared_mutex> lock(all.mutex);
  return all.by_address.size();
}

}  // namespace simdev
