from __future__ import annotations

import torch

from kit.checkpointers import make  # noqa: F401 - a fixture
from kit.late_copies import held  # noqa: F401 - a fixture

torch.set_num_threads(1)  # tensors of some elements: threads only wait for each other
