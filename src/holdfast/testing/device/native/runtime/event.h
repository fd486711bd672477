#pragma once
// An event: a place in the work of a stream, and the time at which the device came to it.

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "runtime/stream.h"

namespace simdev {

class Event {
 public:
  explicit Event(bool has_time) : has_time_(has_time) {}

  // Marks the end of what is queued on the stream by now; forgets the place before.
  void record(Stream& stream);

  // Lets the stream wait for the place that is marked now. An event that was never recorded is waited for by nobody.
  void block(Stream& stream) const;

  // Returns whether the device has come to it. Throws what went wrong before it.
  bool query() const;

  // Lets the host wait for it. Throws what went wrong before it.
  void synchronize() const;

  // The same for a limited time; returns whether the device has come to it.
  bool synchronize_within(double seconds) const;

  double milliseconds_until(const Event& later) const;

 private:
  // One recording; streams that wait for it hold it, whatever becomes of the event.
  struct Place {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::chrono::steady_clock::time_point time;
    ProblemPtr problem;
    Device* device = nullptr;
    std::weak_ptr<Graph> graph;
    bool captured = false;
  };

  std::shared_ptr<Place> place() const;
  static void tell_problem(Place& place);

  const bool has_time_;
  mutable std::mutex mutex_;
  std::shared_ptr<Place> place_;
};

}  // namespace simdev
