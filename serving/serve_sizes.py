"""How large a server's engine becomes, and whether that fits into memory."""

from __future__ import annotations

import dataclasses

from jaxstate.config import DEFAULT_STEP_SHAPES, EngineConfig
from jaxstate.errors import CapacityError
from jaxstate.models.config import ModelConfig
from jaxstate.serving import machine

MAX_MODEL_LEN = 8192
_CONTEXTS = 4  # whole ones that the pool holds, unless told otherwise
_ROOM = 16  # one in so many positions is left to a question and its answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What an operator may say about an engine's sizes.

    Attributes:
      max_model_len: tokens of a context with a question and its answer; None = 8,192, or what the
        model has positions for.
      kv_cells: tokens of all contexts, whole pages; None = four contexts.
      page_size, prefix_share, host_bytes, swap_dir: see EngineConfig.
    """

    max_model_len: int | None
    kv_cells: int | None
    page_size: int
    prefix_share: float
    host_bytes: int
    swap_dir: str | None

    def __post_init__(self):
        """Check ranges."""
        for name, least in (("max_model_len", 2), ("kv_cells", 1), ("page_size", 1)):
            given = getattr(self, name)
            if given is not None and given < least:
                option = name.replace("_", "-")
                raise ValueError(f"{option}: expected at least {least}, got {given}")

    def engine_config(self, model: ModelConfig) -> EngineConfig:
        """Return an engine's sizes.

        Raises:
          ValueError: more than the model's positions.
        """
        longest = self.max_model_len or min(MAX_MODEL_LEN, model.max_positions)
        if longest > model.max_positions:
            raise ValueError(
                f"max-model-len: expected at most the model's {model.max_positions} positions, got "
                f"{longest}"
            )
        cells = self.kv_cells or _CONTEXTS * longest
        return EngineConfig(
            num_pages=-(-cells // self.page_size), page_size=self.page_size,
            context_len=longest - max(longest // _ROOM, 1), evict_quantum=self.page_size,
            # Longer steps than contexts would be compiled for nothing.
            step_shapes=tuple(
                shape for shape in DEFAULT_STEP_SHAPES if shape.num_tokens <= longest
            ),
            prefix_share=self.prefix_share, host_bytes=self.host_bytes, swap_dir=self.swap_dir,
        )  # fmt: skip


def memory(model: ModelConfig, config: EngineConfig, *, is_float: bool) -> str:
    """Say what weights and pool take and what is left, before either is there.

    Args:
      is_float: weights stay floats; what else is made of them is smaller, by how much is not known
        before they are read.
    Raises:
      CapacityError: it does not fit.
    """
    weights = machine.weights_bytes(model)
    cells = config.num_cells * model.bytes_per_cell
    free = machine.free_bytes()
    most = "" if is_float else "at most "
    text = (
        f"weights {most}{_mb(weights)}, keys and values {_mb(cells)} for {config.num_cells:,} cells"
    )
    if free is None:
        return f"{text}; how much memory is free cannot be told here"
    needed = cells + (weights if is_float else 0)
    if needed > free:
        raise CapacityError(
            f"memory: expected at most the {_mb(free)} that are free, got {text}; lower --kv-cells "
            f"({config.num_cells}) or take bfloat16 or a smaller model"
        )
    return f"{text}; headroom {_mb(max(free - weights - cells, 0))} of {_mb(free)}"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
