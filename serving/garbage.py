"""Full collections of Python's garbage, in which every thread stands still, when nobody waits."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

REST_S = 1.0
"""Seconds without anything to do, after which garbage is collected."""

WORTH = 10
"""Collections of young objects since the last full one that make another one worth while."""

AT_LAST = 100
"""Collections of young objects after which Python does it whoever waits: a minute of load."""

_lock = threading.Lock()
_thresholds: list[tuple[int, int, int]] = []  # as they were, one for each who defers


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Collect now, and then only by `collect`; what is there by now is looked at no more.

    A full collection over all that JAX has traced takes 100 ms, and over what a service has
    answered in some minutes as long again. At the end of the last that defers, Python goes on as
    it did before.
    """
    with _lock:
        _thresholds.append(gc.get_threshold())
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_thresholds[0][:2], AT_LAST)
    try:
        yield
    finally:
        with _lock:
            before = _thresholds.pop()
            if not _thresholds:
                gc.unfreeze()
                gc.set_threshold(*before)


def rest_s() -> float | None:
    """Seconds to rest before `collect`; None = it is not worth while."""
    return REST_S if gc.get_count()[2] >= WORTH else None


def collect() -> None:
    """Collect what is worth while."""
    if rest_s() is not None:
        gc.collect()
