"""Tiny models and engines that the oracle runs on, each compiled once per process."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import plain_models

from jaxstate import engine as engine_module
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.executor import Executor
from jaxstate.models import registry
from jaxstate.models.config import DtypePolicy, LayerConfig, ModelConfig
from jaxstate.models.fields import Fields
from jaxstate.models.params import Params, init_params, map_specs
from jaxstate.models.rope import LinearScaling, RopeConfig
from jaxstate.state import StepShape

ONE = StepShape(num_tokens=1, block_tokens=1, num_rows=1)
FOUR = StepShape(num_tokens=4, block_tokens=4, num_rows=4)
SIXTEEN = StepShape(num_tokens=16, block_tokens=16, num_rows=4)
SIXTEEN_IN_BLOCKS = StepShape(num_tokens=16, block_tokens=4, num_rows=4)

NEAR = RopeConfig(theta=30.0)
FAR = RopeConfig(theta=1e4, scaling=LinearScaling(factor=2.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A model and the sizes of an engine for it."""

    name: str
    model: ModelConfig
    sizes: EngineConfig


def _model(**changes) -> ModelConfig:
    sizes = dict(
        family="llama",
        vocab_size=37,
        hidden_size=32,
        mlp_width=40,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_positions=96,
        layers=(LayerConfig(rope=NEAR), LayerConfig(rope=FAR)),
        tied_embeddings=True,
    )
    return ModelConfig(**(sizes | changes))


GROUPED = Setup(
    name="grouped",
    model=_model(),
    sizes=EngineConfig(
        num_pages=48,
        page_size=8,
        context_len=56,
        evict_quantum=16,
        table_capacity=64,
        step_shapes=(ONE, FOUR, SIXTEEN),
        stretch_cells=(32, 8),
        implementation="xla",
    ),
)
"""Query heads in groups of three; steps of one block; evictions in whole pages."""

WINDOWED = Setup(
    name="windowed",
    model=_model(
        num_heads=4,
        num_kv_heads=4,
        max_positions=64,
        tied_embeddings=False,
        layers=(
            LayerConfig(rope=NEAR, window=5),
            LayerConfig(rope=FAR),
            LayerConfig(rope=NEAR, window=14),
        ),
    ),
    sizes=EngineConfig(
        num_pages=96,
        page_size=4,
        context_len=40,
        evict_quantum=6,
        table_capacity=256,
        step_shapes=(ONE, FOUR, SIXTEEN_IN_BLOCKS),
        stretch_cells=(16, 4),
        implementation="xla",
    ),
)
"""Windows on two of three layers; steps of several blocks; evictions inside pages."""

ROTATING = Setup(
    name="rotating",
    model=_model(
        num_heads=4,
        num_kv_heads=1,
        max_positions=24,
        layers=(LayerConfig(rope=FAR), LayerConfig(rope=NEAR, window=7)),
    ),
    sizes=EngineConfig(
        num_pages=13,
        page_size=4,
        context_len=17,
        evict_quantum=3,
        table_capacity=256,
        step_shapes=(ONE, FOUR, SIXTEEN_IN_BLOCKS),
        stretch_cells=(8, 4),
        implementation="xla",
    ),
)
"""Few positions, so that a sliding session passes many rotation epochs; a pool that runs full."""


def of_family(name: str, **changes) -> Setup:
    """Return a setup of a model family, as its own file reads a tiny config.json.

    Args:
      name: of plain_models.CONFIGS.
      changes: of the config.json.
    """
    settings = plain_models.config_of(name) | {"head_dim": 16} | changes
    form = registry.hf_format(settings["architectures"])
    model = form.config(Fields(settings, name), DtypePolicy())
    return native(dataclasses.replace(WINDOWED, name=name, model=model))


def native(setup: Setup) -> Setup:
    """Return the setup with the attention that an engine takes by itself on this machine."""
    sizes = dataclasses.replace(setup.sizes, implementation="auto", stretch_cells=None)
    return dataclasses.replace(setup, name=f"{setup.name}-native", sizes=sizes)


@functools.cache
def params_of(setup: Setup) -> Params:
    """Draw weights with uneven norms and logits spread wide enough that near-ties are rare."""
    rng = np.random.default_rng(5)
    params = init_params(setup.model, seed=3)

    def scale(path, spec):
        spread = rng.uniform(0.5, 1.5, spec.shape) if spec.kind == "norm" else 1.0
        return spread * (4.0 if path == "final_norm" else 1.0)

    def offset(_, spec):
        return rng.uniform(-0.5, 0.5, spec.shape) if spec.kind == "bias" else 0.0

    scales, offsets = map_specs(scale, setup.model), map_specs(offset, setup.model)
    return jax.tree.map(
        lambda weight, by, to: (weight * jnp.asarray(by, weight.dtype) + to).astype(weight.dtype),
        params,
        scales,
        offsets,
    )


@functools.cache
def compiled(setup: Setup) -> Executor:
    """Compile a setup's executables, once."""
    return Executor(params_of(setup), setup.model, setup.sizes)


def engine_on(executor: Executor, setup: Setup) -> Engine:
    """Return an engine without sessions around an executor, whose pool may hold old cells."""
    with mock.patch.object(engine_module, "Executor", return_value=executor):
        return Engine(params_of(setup), setup.model, setup.sizes)
