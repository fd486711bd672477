#pragma once
// The memory of devices: a caching allocator. Device memory is memory of the host that only streams touch.
//
// A block that is freed may be taken again at once by the stream that had it, since what it does next comes after what
// it did before. Another stream that still reads it reads what the next owner writes, unless the block was recorded on
// it.

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "runtime/stream.h"

namespace simdev {

struct Block {
  void* address;
  size_t size;       // bytes, a multiple of 512
  size_t requested;  // bytes
  int device;
  int64_t stream;
  uint64_t pool;              // of a graph; 0: of none
  std::set<int64_t> users{};  // other streams that it was recorded on
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;

class Memory {
 public:
  explicit Memory(int device) : device_(device) {}

  // Returns a block of at least one byte for the current stream. Throws torch.OutOfMemoryError when the card is full.
  Block* take(size_t bytes);

  // The block is free: at once, or when the streams that it was recorded on have come to this place.
  void give_back(Block* block);

  // Keeps the block from being taken again before the stream has done what is queued on it when it is freed.
  void record(Block* block, int64_t stream);

  // The last graph of a pool has gone: what was taken for it serves everybody.
  void open_pool(uint64_t pool);

  // Waits for the device and returns what is cached to the card.
  void empty();

  Stats stats();
  void reset_peaks();
  void reset_totals();

 private:
  using Key = std::tuple<uint64_t, int64_t, size_t>;  // pool, stream, size

  Block* take_cached(const Key& key);
  void* map(size_t size);
  void cache(Block* block);
  std::vector<Block*> uncache();
  void unmap(const std::vector<Block*>& blocks);

  const int device_;
  std::mutex mutex_;
  std::map<Key, std::vector<Block*>> free_;
  std::set<uint64_t> open_pools_{0};
  Stats stats_;
};

Memory& memory(int device);

// What a pointer's owner calls with the block when the tensor has gone.
void free_block(void* block);

}  // namespace simdev
