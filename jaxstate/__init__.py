"""A data-driven LLM engine: sessions that stay on the device while data streams in."""

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
