#pragma once
// What the user chooses. The environment gives the beginning; rates and times may change while the devices work.

#include <atomic>
#include <cstddef>
#include <string>

namespace simdev {

// What becomes of the work behind a collective that is aborted, or of the abort itself.
enum class Abort {
  kGoesOn,  // it is done with what is in memory, as after NCCL's abort
  kError,   // it is skipped, and whoever waits for it is told
  kHangs    // abort() does not return before this changes; the device goes on
};

Abort abort_of(const std::string& name);  // "goes on", "error", "hangs"

// What memory of the host the devices reach by themselves.
enum class HostMemory {
  kRegistered,  // what the user registers, and what PyTorch pins
  kPinned,      // what PyTorch pins
  kNone         // none: every copy makes the host wait
};

struct Settings {
  std::string name;   // of the device type, as in torch.device("sim")
  int num_devices;    // SIMULATED_DEVICE_COUNT
  size_t memory;      // SIMULATED_DEVICE_MEMORY: bytes of each card
  size_t context;     // SIMULATED_DEVICE_CONTEXT: bytes that each process takes of a card that it uses
  std::string cards;  // SIMULATED_DEVICE_CARDS: a folder through which processes share the cards; empty: not shared
  HostMemory host_memory;  // SIMULATED_DEVICE_HOST_MEMORY: "registered", "pinned", "none"
  std::atomic<double> copy_rate;  // SIMULATED_DEVICE_COPY_RATE: bytes per second to and from the host; 0: at once
  std::atomic<double>
      kernel_time;           // SIMULATED_DEVICE_KERNEL_TIME: seconds of every kernel; 0: as long as the CPU takes
  std::atomic<Abort> abort;  // SIMULATED_DEVICE_ABORT
};

Settings& settings();

// How often something happened in this process, for tests to count.
struct Counts {
  std::atomic<long> queued{0};           // kernels that the host did not wait for
  std::atomic<long> waited{0};           // kernels that the host waited for, since it needed their numbers or shapes
  std::atomic<long> late_copies{0};      // copies between host and device that the host did not wait for
  std::atomic<long> blocking_copies{0};  // and those that it did
  std::atomic<long> collectives{0};
  std::atomic<long> replays{0};  // of graphs
};

Counts& counts();

}  // namespace simdev
