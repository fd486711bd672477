#include "runtime/memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <atomic>
#include <memory>

#include "runtime/card.h"
#include "runtime/device.h"
#include "runtime/errors.h"
#include "runtime/graph.h"
#include "runtime/process.h"

namespace simdev {

namespace {

constexpr size_t kUnit = 512;

void count(c10::CachingAllocator::StatArray& stat, int64_t change) {
  auto& all = stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  change > 0 ? all.increase(change) : all.decrease(-change);
}

template <class Change>
void each_stat(Stats& stats, const Change& change) {
  for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                     &stats.active_bytes, &stats.requested_bytes}) {
    change((*stat)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)]);
  }
}

}  // namespace

Block* Memory::take(size_t bytes) {
  Stream& stream = current_stream(device_);
  const auto graph = stream.capture();
  const size_t size = (bytes + kUnit - 1) / kUnit * kUnit;
  const uint64_t pool = graph ? graph->pool() : 0;
  Block* block = take_cached({pool, stream.id(), size});
  if (!block) block = new Block{map(size), size, bytes, device_, stream.id(), pool};
  const std::lock_guard<std::mutex> lock(mutex_);
  block->requested = bytes;
  count(stats_.allocation, 1);
  count(stats_.active, 1);
  count(stats_.allocated_bytes, static_cast<int64_t>(size));
  count(stats_.active_bytes, static_cast<int64_t>(size));
  count(stats_.requested_bytes, static_cast<int64_t>(bytes));
  return block;
}

Block* Memory::take_cached(const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = free_.find(key);
  if (found == free_.end() || found->second.empty()) return nullptr;
  Block* block = found->second.back();
  found->second.pop_back();
  return block;
}

void* Memory::map(size_t size) {
  device(device_).check();
  if (!card(device_).take(size)) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++stats_.num_alloc_retries;
    }
    empty();
    if (!card(device_).take(size)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++stats_.num_ooms;
      throw_out_of_memory(device_, size, card(device_).unused(), card(device_).total());
    }
  }
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "the host has no memory left for device ", device_);
  const std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.num_device_alloc;
  count(stats_.segment, 1);
  count(stats_.reserved_bytes, static_cast<int64_t>(size));
  return address;
}

void Memory::give_back(Block* block) {
  std::set<int64_t> users;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    users.swap(block->users);
    count(stats_.allocation, -1);
    count(stats_.allocated_bytes, -static_cast<int64_t>(block->size));
    count(stats_.requested_bytes, -static_cast<int64_t>(block->requested));
  }
  if (users.empty()) return cache(block);
  const auto left = std::make_shared<std::atomic<size_t>>(users.size());
  for (const int64_t user : users) {
    device(device_).stream(user).push_mark([this, block, left](const ProblemPtr&) {
      if (--*left == 0) cache(block);
    });
  }
}

void Memory::cache(Block* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  count(stats_.active, -1);
  count(stats_.active_bytes, -static_cast<int64_t>(block->size));
  if (open_pools_.count(block->pool)) block->pool = 0;
  free_[{block->pool, block->stream, block->size}].push_back(block);
}

void Memory::open_pool(uint64_t pool) {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_pools_.insert(pool);
  for (auto place = free_.lower_bound({pool, 0, 0}); place != free_.end() && std::get<0>(place->first) == pool;) {
    for (Block* block : place->second) {
      block->pool = 0;
      free_[{0, block->stream, block->size}].push_back(block);
    }
    place = free_.erase(place);
  }
}

void Memory::record(Block* block, int64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stream != block->stream) block->users.insert(stream);
}

void Memory::empty() {
  device(device_).synchronize();
  unmap(uncache());
}

std::vector<Block*> Memory::uncache() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Block*> blocks;
  for (auto& [key, cached] : free_) {
    if (std::get<0>(key) != 0) continue;  // a graph will use it again
    blocks.insert(blocks.end(), cached.begin(), cached.end());
    cached.clear();
  }
  return blocks;
}

void Memory::unmap(const std::vector<Block*>& blocks) {
  for (Block* block : blocks) {
    munmap(block->address, block->size);
    card(device_).give_back(block->size);
    const std::lock_guard<std::mutex> lock(mutex_);
    ++stats_.num_device_free;
    count(stats_.segment, -1);
    count(stats_.reserved_bytes, -static_cast<int64_t>(block->size));
    delete block;
  }
}

Stats Memory::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void Memory::reset_peaks() {
  const std::lock_guard<std::mutex> lock(mutex_);
  each_stat(stats_, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
}

void Memory::reset_totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  each_stat(stats_, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  stats_.num_alloc_retries = 0;
  stats_.num_ooms = 0;
}

Memory& memory(int device) {
  static auto* const all = [] {
    auto* memories = new std::vector<Memory*>;
    for (int i = 0; i < num_devices(); ++i) memories->push_back(new Memory(i));
    return memories;
  }();
  return *all->at(device);
}

void free_block(void* block) {
  if (!block || forked()) return;  // in a forked child the memory is the parent's
  auto* const ours = static_cast<Block*>(block);
  memory(ours->device).give_back(ours);
}

}  // namespace simdev
