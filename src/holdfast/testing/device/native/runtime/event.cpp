#include "runtime/event.h"

#include <c10/util/Exception.h>

#include "runtime/device.h"
#include "runtime/graph.h"
#include "runtime/process.h"

namespace simdev {

std::shared_ptr<Event::Place> Event::place() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return place_;
}

void Event::record(Stream& stream) {
  auto place = std::make_shared<Place>();
  place->device = &stream.device();
  if (const auto graph = stream.capture()) {
    place->graph = graph;
    place->captured = true;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    place_ = place;
  }
  stream.push_mark([place](const ProblemPtr& problem) {
    {
      const std::lock_guard<std::mutex> lock(place->mutex);
      place->done = true;
      place->time = std::chrono::steady_clock::now();
      place->problem = problem;
    }
    place->changed.notify_all();
  });
}

void Event::block(Stream& stream) const {
  const auto place = this->place();
  if (!place) return;
  const auto graph = stream.capture();
  if (place->captured) {
    const auto theirs = place->graph.lock();
    if (graph && graph != theirs) graph->spoil("waiting for an event of another capture");
    if (theirs && !graph) theirs->join(stream);
    return;  // a graph replays in the order of its capture
  }
  if (graph) graph->spoil("waiting for an event that was recorded outside of the capture");
  stream.push([place, &stream] {
    stream.device().wait_until([&place] {
      std::unique_lock<std::mutex> lock(place->mutex);
      return place->changed.wait_for(lock, std::chrono::milliseconds(20), [&place] { return place->done; });
    });
    const std::lock_guard<std::mutex> lock(place->mutex);
    // A problem of its own: somebody who waits for this stream must hear of it, whoever heard of the other.
    if (place->problem) throw StreamFailed{std::make_shared<Problem>(place->problem->why)};
  });
}

bool Event::query() const {
  check_process();
  const auto place = this->place();
  if (!place) return true;
  if (place->captured) {
    if (const auto graph = place->graph.lock()) graph->spoil("asking for an event of the capture");
  }
  place->device->check();
  const std::lock_guard<std::mutex> lock(place->mutex);
  if (place->done) tell_problem(*place);
  return place->done;
}

void Event::synchronize() const {
  while (!synchronize_within(3600)) {
  }
}

bool Event::synchronize_within(double seconds) const {
  check_process();
  const auto place = this->place();
  if (!place) return true;
  if (place->captured) {
    if (const auto graph = place->graph.lock()) graph->spoil("waiting for an event of the capture");
  }
  {
    const WithoutGil unlocked;
    std::unique_lock<std::mutex> lock(place->mutex);
    const auto over = [&] { return place->done || stopping(); };
    if (!place->changed.wait_for(lock, std::chrono::duration<double>(seconds), over)) return false;
  }
  place->device->check();
  const std::lock_guard<std::mutex> lock(place->mutex);
  tell_problem(*place);
  return true;
}

void Event::tell_problem(Place& place) {
  if (!place.problem) return;
  place.problem->told = true;
  TORCH_CHECK(false, place.problem->why);
}

double Event::milliseconds_until(const Event& later) const {
  TORCH_CHECK(has_time_ && later.has_time_, "both events must be created with argument 'enable_timing=True'");
  const auto begin = place(), end = later.place();
  TORCH_CHECK(begin && end, "both events must be recorded before their time is asked for");
  TORCH_CHECK(query() && later.query(), "both events must be completed before their time is asked for");
  return std::chrono::duration<double, std::milli>(end->time - begin->time).count();
}

}  // namespace simdev
