"""One script for a device: what is right there, and how far is it from what is possible?

    python bench/device_check.py --part kernels|sessions [--out FILE] [--only NAME …] [--tiny]

Part "kernels" is every kernel and the step, in eight minutes; part "sessions" is many sessions of a
service on an 8B model with random weights, in six. Runs on whatever accelerator jax finds, with
nothing beyond jax, numpy and flax, from a checkout that need not be installed. JSON lines go to
stdout and to FILE, progress and a table to stderr. A line is about one of these:

- "check": what must be right, against plain XLA in f32 (sessions: one verb at a time there);
  "measured", "limit", "holds".
- "timing": milliseconds of a call, warm, median over rounds; "floor" is what moving its bytes and
  computing its products takes at best, at rates of the same run, "ratio" the time divided by it.
  Attention is timed per layer of several ("layers").
- "measure": what a caller waits for, milliseconds; with "measured": null what was not measured, and
  the reason.
- "bar": a number with a limit, decided on one kind of device, else "holds": null.
- "arm": the device with its rates, and the model.

The exit code is 1 if a check does not hold, something raised or the deadline cut a job short.
"""

from __future__ import annotations

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).with_name("device")))
import device_sources  # noqa: E402

if __name__ == "__main__":
    _began = time.perf_counter()
    device_sources.make_importable()
    import device_jobs

    sys.exit(device_jobs.main(_began))
