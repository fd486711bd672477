#include "runtime/settings.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>

namespace simdev {

namespace {

double number(const char* variable, double otherwise) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  TORCH_CHECK(*end == '\0' && value >= 0, variable, " is '", text, "', and must be a number that is not negative");
  return value;
}

std::string text(const char* variable, const char* otherwise) {
  const char* value = std::getenv(variable);
  return value && *value ? value : otherwise;
}

HostMemory host_memory_of(const std::string& name) {
  if (name == "registered") return HostMemory::kRegistered;
  if (name == "pinned") return HostMemory::kPinned;
  TORCH_CHECK(name == "none", "SIMULATED_DEVICE_HOST_MEMORY is registered, pinned, or none; not '", name, "'");
  return HostMemory::kNone;
}

}  // namespace

Abort abort_of(const std::string& name) {
  if (name == "goes on") return Abort::kGoesOn;
  if (name == "error") return Abort::kError;
  TORCH_CHECK(name == "hangs", "an abort goes on, is an error, or hangs; not '", name, "'");
  return Abort::kHangs;
}

Settings& settings() {
  static auto* const chosen = new Settings{
      text("SIMULATED_DEVICE_NAME", "sim"),
      static_cast<int>(number("SIMULATED_DEVICE_COUNT", 4)),
      static_cast<size_t>(number("SIMULATED_DEVICE_MEMORY", 16.0 * (1ull << 30))),
      static_cast<size_t>(number("SIMULATED_DEVICE_CONTEXT", 32.0 * (1ull << 20))),
      text("SIMULATED_DEVICE_CARDS", ""),
      host_memory_of(text("SIMULATED_DEVICE_HOST_MEMORY", "registered")),
      number("SIMULATED_DEVICE_COPY_RATE", 0),
      number("SIMULATED_DEVICE_KERNEL_TIME", 0),
      abort_of(text("SIMULATED_DEVICE_ABORT", "goes on")),
  };
  return *chosen;
}

Counts& counts() {
  static auto* const all = new Counts;
  return *all;
}

}  // namespace simdev
