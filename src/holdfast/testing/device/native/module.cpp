// The Python module: what torch_sim.py and the tests call.

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "aten/generator.h"
#include "aten/hooks.h"
#include "aten/launch.h"
#include "distributed/backend.h"
#include "runtime/card.h"
#include "runtime/device.h"
#include "runtime/host_memory.h"
#include "runtime/memory.h"
#include "runtime/process.h"
#include "runtime/settings.h"

namespace {

using namespace simdev;

pybind11::dict all_counts() {
  const auto& all = counts();
  pybind11::dict result;
  result["queued"] = all.queued.load();
  result["waited"] = all.waited.load();
  result["late_copies"] = all.late_copies.load();
  result["blocking_copies"] = all.blocking_copies.load();
  result["collectives"] = all.collectives.load();
  result["replays"] = all.replays.load();
  result["registered"] = num_registered();
  return result;
}

// Registration belongs to the context of the current device, which it makes where there is none, as on real devices.
bool register_on_current(uintptr_t address, size_t bytes) {
  device(current_device()).check();
  return settings().host_memory == HostMemory::kRegistered && register_host(address, bytes);
}

bool unregister_on_current(uintptr_t address) {
  device(current_device()).check();
  return unregister_host(address);
}

void fault(int index, const std::string& why, bool now) {
  if (now) return device(index).fail(why);
  launch(index, [index, why] { device(index).fail(why); });
}

void sleep_on_device(int index, double seconds) {
  launch(index, [index, seconds] { device(index).pause(seconds); });
}

c10::intrusive_ptr<c10d::Backend> wrap(c10d::Backend* carrier, c10d::Store* store, double timeout_s) {
  return make_backend(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(carrier),
                      c10::intrusive_ptr<c10d::Store>::reclaim_copy(store), timeout_s);
}

}  // namespace

PYBIND11_MODULE(SIMDEV_MODULE, m) {
  m.def("start", &register_with_torch);
  m.def("stop", &stop);
  m.def("name", [] { return settings().name; });
  m.def("device_count", &num_devices);
  m.def("forked", &forked);
  // PyTorch asks the hooks of a device only once it has made this call: whether memory is pinned, for one.
  m.def("initialize", [] { at::globalContext().lazyInitDevice(kDeviceType); });
  m.def("in_use", &in_use);
  m.def("any_in_use", &any_in_use);
  m.def("use", [](int index) { device(index).check(); });
  m.def("set_copy_rate", [](double rate) { settings().copy_rate = rate; });
  m.def("set_kernel_time", [](double seconds) { settings().kernel_time = seconds; });
  m.def("set_abort", [](const std::string& how) { settings().abort = abort_of(how); });
  m.def("register", &register_on_current);
  m.def("unregister", &unregister_on_current);
  m.def("hang", [](int index) { device(index).hang(current_stream(index)); });
  m.def("free", [](int index) { device(index).free(); });
  m.def("fault", &fault);
  m.def("sleep", &sleep_on_device);
  m.def("counts", &all_counts);
  m.def("holders", [](int index) { return card(index).holders(); });
  m.def("is_capturing", [](int index) { return in_use(index) && current_stream(index).capture() != nullptr; });
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("wrap", &wrap);
}
