"""`python -m holdfast.testing.device`: builds the device and prints the folder that loads it wherever it is on PYTHONPATH."""

from __future__ import annotations

import sys

from holdfast.testing import device

if __name__ == "__main__":
    if reason := device.unavailable():
        sys.exit(reason)
    device.build_now()
    sys.stdout.write(f"{device.autoload_directory()}\n")
