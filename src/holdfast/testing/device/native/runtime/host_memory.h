#pragma once
// Memory of the host that devices reach without the host's help: registered by its owner, or taken from the pinned
// allocator.

#include <cstddef>
#include <cstdint>
#include <functional>

namespace simdev {

// Registers memory for copies that the host does not wait for. False: a part of it is registered already.
bool register_host(uintptr_t address, size_t bytes);

// False: no registered memory begins there. Waits for the piece of a copy that is being written.
bool unregister_host(uintptr_t address);

// Whether all of it is registered or pinned.
bool is_reachable(const void* address, size_t bytes);

// Calls `touch` while the memory cannot be unregistered. Throws, as a device would fault, if it is registered no more.
void reach(const void* address, size_t bytes, const std::function<void()>& touch);

// Pinned memory. It is unmapped when its tensor has gone and no copy of it is under way.
void* take_pinned(size_t bytes);
void free_pinned(void* address, size_t bytes);

size_t num_registered();

}  // namespace simdev
