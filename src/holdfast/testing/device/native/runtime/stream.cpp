#include "runtime/stream.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <chrono>
#include <thread>

#include "runtime/device.h"
#include "runtime/errors.h"
#include "runtime/graph.h"
#include "runtime/process.h"

namespace simdev {

void Stream::push(Work work) {
  if (const auto graph = capture()) {
    graph->add([work = std::move(work)] { return work; });
  } else {
    enqueue({std::move(work), nullptr});
  }
}

void Stream::push_made(std::function<Work()> make) {
  if (const auto graph = capture()) {
    graph->add(std::move(make));
  } else {
    enqueue({make(), nullptr});
  }
}

void Stream::push_mark(Mark mark) {
  if (capture()) {
    mark(nullptr);
  } else {
    enqueue({nullptr, std::move(mark)});
  }
}

void Stream::enqueue(Task task) {
  check_process();
  if (stopping()) return;
  if (task.work) device_.check();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!has_thread_) {
      std::thread([this] { run(); }).detach();
      has_thread_ = true;
    }
    task.forgets_problem = problem_ && problem_->told;
    queue_.push_back(std::move(task));
    ++num_queued_;
  }
  changed_.notify_all();
}

void Stream::run() {
  const LivingThread living;
  pthread_setname_np(pthread_self(), "sim stream");
  const auto tick = std::chrono::milliseconds(100);  // how late the end of the process may be noticed
  while (!stopping()) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!changed_.wait_for(lock, tick, [this] { return !queue_.empty(); })) continue;
      task = std::move(queue_.front());
      queue_.pop_front();
      if (task.forgets_problem) problem_.reset();
    }
    perform(task);
    task = {};  // what the work held is free before anybody is told that it is done
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++num_done_;
    }
    changed_.notify_all();
  }
}

void Stream::perform(Task& task) {
  ProblemPtr problem = device_.fault();
  if (!problem) {
    const std::lock_guard<std::mutex> lock(mutex_);
    problem = problem_;
  }
  if (task.mark) return task.mark(problem);
  if (problem) return;
  try {
    task.work();
  } catch (const StreamFailed& failed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    problem_ = failed.problem;
  } catch (const std::exception& error) {
    device_.fail(brief(error));
  }
}

void Stream::drain() {
  check_process();
  check_not_capturing("waiting for a stream");
  {
    const WithoutGil unlocked;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto all = num_queued_;
    changed_.wait(lock, [&] { return num_done_ >= all || stopping(); });
  }
  tell_problem();
}

bool Stream::drain_within(double seconds) {
  const WithoutGil unlocked;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto all = num_queued_;
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return num_done_ >= all; });
}

bool Stream::idle() {
  check_process();
  check_not_capturing("asking whether a stream is done");
  tell_problem();
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_done_ == num_queued_;
}

void Stream::tell_problem() {
  device_.check();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (problem_ && !problem_->told.exchange(true)) TORCH_CHECK(false, problem_->why);
}

std::shared_ptr<Graph> Stream::capture() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return capture_;
}

void Stream::set_capture(std::shared_ptr<Graph> graph) {
  const std::lock_guard<std::mutex> lock(mutex_);
  capture_ = std::move(graph);
}

void Stream::check_not_capturing(const char* what) const {
  if (const auto graph = capture()) graph->spoil(what);
}

}  // namespace simdev
