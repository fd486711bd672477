#include "runtime/errors.h"

#include "runtime/settings.h"

namespace simdev {

namespace {
c10::SourceLocation here(const char* function) { return {function, __FILE__, static_cast<uint32_t>(__LINE__)}; }

std::string mib(size_t bytes) { return c10::str(static_cast<double>(bytes) / (1 << 20), " MiB"); }
}  // namespace

void throw_fault(const std::string& why) {
  const auto text =
      c10::str(settings().name, " error: the device has a fault, and every call fails until this process ends: ", why);
  throw c10::AcceleratorError(here("check"), 710, text);
}

void throw_out_of_memory(int device, size_t wanted, size_t unused, size_t total) {
  const auto text = c10::str(settings().name, " out of memory. Tried to allocate ", mib(wanted), ". Device ", device,
                             " has a total capacity of ", mib(total), " of which ", mib(unused), " is free.");
  throw c10::OutOfMemoryError(here("allocate"), text);
}

std::string brief(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs ? torchs->what_without_backtrace() : error.what();
}

}  // namespace simdev
