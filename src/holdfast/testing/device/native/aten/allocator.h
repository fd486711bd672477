#pragma once
// The allocators of devices and of pinned memory, as PyTorch calls them.

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>

namespace simdev {

c10::Allocator* device_allocator();
at::HostAllocator* pinned_allocator();

// Whether the memory comes from the pinned allocator, which waits for copies under way before it lets go.
bool is_from_pinned_allocator(const c10::DataPtr& pointer);

}  // namespace simdev
