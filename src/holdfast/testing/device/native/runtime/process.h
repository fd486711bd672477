#pragma once
// What is true of the whole process: it was forked while it used a device; it ends; whether it holds Python's lock.

#include <atomic>
#include <chrono>

namespace simdev {

// True in a child that was forked after a device was in use: its threads do not exist here, every call refuses.
bool forked();

// True while the process ends: streams stop after what they are doing, and nothing waits for them.
bool stopping();

// Throws in a forked child.
void check_process();

// Lets the forked child know. Called before the first thread starts.
void watch_forks();

// Ends the threads of all streams: each leaves after the kernel that it is in; waits for them two seconds at most.
void stop();

// The thread of a stream exists as long as this does.
struct LivingThread {
  LivingThread();
  ~LivingThread();
};

// Between two questions of a thread that waits: an eighth of what it has waited, so that a wait ends little later than it
// could, and a long one takes no processor time to speak of, as on a card.
class Pauses {
 public:
  explicit Pauses(std::chrono::microseconds first) : first_(first) {}
  std::chrono::microseconds next() const;

 private:
  const std::chrono::microseconds first_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

// Lets go of Python's global lock, if this thread holds it, while a host thread waits for a device.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* saved_ = nullptr;
};

}  // namespace simdev
