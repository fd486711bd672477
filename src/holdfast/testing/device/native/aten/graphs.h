#pragma once
// torch.accelerator.Graph on these devices, where PyTorch has it (from 2.13 on).

namespace simdev {

void register_graphs();

}  // namespace simdev
