#include "runtime/process.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "runtime/settings.h"

namespace simdev {

namespace {
std::atomic<bool> is_forked{false};
std::atomic<bool> is_stopping{false};
std::atomic<int> living_threads{0};
}  // namespace

bool forked() { return is_forked; }

bool stopping() { return is_stopping; }

void check_process() {
  TORCH_CHECK(!forked(), "Cannot re-initialize ", settings().name,
              " in a forked subprocess: the devices were in use before the fork. Use the 'spawn' start method, or fork "
              "before the first use of a device.");
}

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { is_forked = true; }); });
}

void stop() {
  if (forked()) return;
  is_stopping = true;
  const WithoutGil unlocked;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (living_threads > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::chrono::microseconds Pauses::next() const {
  const auto waited = std::chrono::steady_clock::now() - began_;
  const auto part = std::chrono::duration_cast<std::chrono::microseconds>(waited) / 8;
  return std::clamp(part, first_, std::chrono::microseconds(20'000));
}

LivingThread::LivingThread() { ++living_threads; }

LivingThread::~LivingThread() { --living_threads; }

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) saved_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (saved_) PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
}

}  // namespace simdev
