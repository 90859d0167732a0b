"""How often XLA compiled although everything should be compiled."""

from __future__ import annotations

import threading
from typing import Any

import jax.monitoring

from jaxstate import executor

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts programs that a thread compiles, or fetches from the persistent cache, while in it.

    Other threads may compile what they like, further engines for instance.
    """

    def __init__(self):
        """Start at zero; to be entered by the thread that is watched."""
        self._thread: int | None = None
        self._count = 0
        self._told = False

    def __enter__(self) -> Compilations:
        """Count from now on what this thread compiles."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        # The event's name is no promise of jax: see whether it still comes.
        executor.compile_probe()
        self._told = self._count > 0
        self._count = 0
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @property
    def count(self) -> int | None:
        """Programs so far; None = this version of jax does not tell."""
        return self._count if self._told else None

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _EVENT and threading.get_ident() == self._thread:
            self._count += 1
