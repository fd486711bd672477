#pragma once
// A device of this process: its streams, its fault, and the kernels that hang on it.

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/stream.h"

namespace simdev {

class Device {
 public:
  explicit Device(int index);

  int index() const { return index_; }

  // The stream of that number; 0 is the default stream.
  Stream& stream(int64_t id);

  // One of 32 streams, in turn: as on real devices, two that were asked for apart may be the same.
  Stream& stream_of_pool();

  // A stream that nobody else has, until it is given back.
  Stream& lend_stream();
  void take_back(Stream& stream);

  // All streams that exist.
  std::vector<Stream*> streams();

  // Waits until all streams have done what is queued by now. Throws what went wrong.
  void synchronize();

  // Throws if the device has a fault, or the process was forked.
  void check() const;

  // A fault stays until the process ends: work is skipped, every call throws. What hangs ends.
  void fail(const std::string& why);
  ProblemPtr fault() const;

  // Lets the stream's work take so many seconds more. Ends early when the device fails or the process ends.
  void pause(double seconds);

  // Waits, on a stream, until `done` returns true. False: the device failed or the process ends. Asked each
  // millisecond.
  bool wait_until(const std::function<bool()>& done);

  // Calls `move` while no other copy in that direction moves: all streams share the way to the host and the way back.
  void use_link(bool to_host, const std::function<void()>& move);

  // Queues a kernel that does not end before free(). free() ends all that were queued before it.
  void hang(Stream& stream);
  void free();

 private:
  const int index_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Stream*> unused_;
  size_t num_given_ = 0;
  ProblemPtr fault_;
  uint64_t num_hung_ = 0;
  uint64_t num_freed_ = 0;
  std::mutex link_to_host_;
  std::mutex link_from_host_;
};

// The device of that number, which is in use from the first call on: it takes memory of its card, and a fork refuses.
Device& device(int index);

// Whether this process uses the device.
bool in_use(int index);

// Whether it uses any.
bool any_in_use();

int num_devices();

// The device and, for each device, the stream that the calling thread works with.
int current_device();
int exchange_device(int index);  // returns the one before
Stream& current_stream(int index);
int64_t exchange_stream(int index, int64_t id);
int64_t current_stream_id(int index);

}  // namespace simdev
