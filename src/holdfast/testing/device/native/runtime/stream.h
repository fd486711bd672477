#pragma once
// A stream: a thread that does what was queued, in order, while the host goes on.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace simdev {

class Device;
class Graph;

using Work = std::function<void()>;

// Why the work of a stream was skipped. The stream works again with what is queued after a host call has told it.
struct Problem {
  explicit Problem(std::string why) : why(std::move(why)) {}
  const std::string why;
  std::atomic<bool> told{false};
};
using ProblemPtr = std::shared_ptr<Problem>;

// Thrown by work that ends the rest of its stream's work, but leaves the device sound.
struct StreamFailed {
  ProblemPtr problem;
};

// Called in the stream's order even if the work before it was skipped; then it is told why.
using Mark = std::function<void(const ProblemPtr&)>;

class Stream {
 public:
  Stream(Device& device, int64_t id) : device_(device), id_(id) {}

  Device& device() const { return device_; }
  int64_t id() const { return id_; }

  // Queues work and returns. An exception in it is a fault of the device, as an assertion in a kernel is.
  void push(Work work);

  // Queues what `make` returns; a graph asks for it anew at each replay.
  void push_made(std::function<Work()> make);

  // Queues a mark. In a capture it is called at once.
  void push_mark(Mark mark);

  // Waits until all is done that is queued by now. Throws what went wrong on this stream or its device.
  void drain();

  // Waits as drain() does, but at most so long, and tells nothing of what went wrong. False: it is not done.
  bool drain_within(double seconds);

  // Returns whether all is done. Throws as drain() does.
  bool idle();

  // The graph that what is queued now becomes a part of; none: it runs.
  std::shared_ptr<Graph> capture() const;
  void set_capture(std::shared_ptr<Graph> graph);

 private:
  struct Task {
    Work work;
    Mark mark;
    bool forgets_problem = false;
  };

  void enqueue(Task task);
  void run();
  void perform(Task& task);
  void check_not_capturing(const char* what) const;
  void tell_problem();

  Device& device_;
  const int64_t id_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  uint64_t num_queued_ = 0;
  uint64_t num_done_ = 0;
  bool has_thread_ = false;
  ProblemPtr problem_;
  std::shared_ptr<Graph> capture_;
};

}  // namespace simdev
