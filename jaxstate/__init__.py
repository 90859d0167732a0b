"""A data-driven LLM engine: sessions that stay on the device while data streams in.

Names are imported when they are first used: a client of a server needs no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxstate.answer import Answer, FinishReason, Source, Token
    from jaxstate.config import EngineConfig
    from jaxstate.constraint import Constraint
    from jaxstate.engine import Engine
    from jaxstate.errors import (
        CapacityError,
        InputError,
        JaxStateError,
        SessionError,
        SnapshotError,
    )
    from jaxstate.functional import (
        SessionConfig,
        SessionState,
        advance,
        append,
        init_state,
        query,
        start,
    )
    from jaxstate.kernels_pallas.block_selector import BlockSelector
    from jaxstate.sampling import Sampling
    from jaxstate.snapshot import restore_state, save_state
    from jaxstate.state import StepShape

_HOMES = {
    "answer": ("Answer", "FinishReason", "Source", "Token"),
    "config": ("EngineConfig",),
    "constraint": ("Constraint",),
    "engine": ("Engine",),
    "errors": ("CapacityError", "InputError", "JaxStateError", "SessionError", "SnapshotError"),
    "functional": (
        "SessionConfig", "SessionState", "advance", "append", "init_state", "query", "start",
    ),
    "kernels_pallas.block_selector": ("BlockSelector",),
    "sampling": ("Sampling",),
    "snapshot": ("restore_state", "save_state"),
    "state": ("StepShape",),
}  # fmt: skip

__all__ = [
    "Answer",
    "BlockSelector",
    "CapacityError",
    "Constraint",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "InputError",
    "JaxStateError",
    "Sampling",
    "SessionConfig",
    "SessionError",
    "SessionState",
    "SnapshotError",
    "Source",
    "StepShape",
    "Token",
    "advance",
    "append",
    "init_state",
    "query",
    "restore_state",
    "save_state",
    "start",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that has it."""
    for home, names in _HOMES.items():
        if name in names:
            found = getattr(importlib.import_module(f"jaxstate.{home}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return [*__all__, *globals()]
