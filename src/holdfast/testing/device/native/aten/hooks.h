#pragma once
// Makes the devices known to PyTorch. Called once, after the device type has its name.

namespace simdev {

void register_with_torch();

}  // namespace simdev
