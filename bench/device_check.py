"""One script for a device: is every kernel right there, and how far is it from what is possible?

    python bench/device_check.py --part kernels [--out FILE] [--only NAME …] [--tiny]

Runs on whatever accelerator jax finds, with nothing beyond jax, numpy and flax, from a checkout
that need not be installed. JSON lines go to stdout and to FILE, progress and a table to stderr.
The exit code is 1 if a check does not hold or something raised. bench/README.md says what every
line and bar means.
"""

from __future__ import annotations

import sys
import time

import device_sources

if __name__ == "__main__":
    _began = time.perf_counter()
    device_sources.make_importable()
    import device_jobs

    sys.exit(device_jobs.main(_began))
