"""A tiny engine for the tests of the core, a dense forward to hold it against, all its state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate import models
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.state import StepShape

MODEL = models.ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    mlp_width=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=2.0**-17,
    max_positions=128,
    layers=(models.LayerConfig(rope=models.RopeConfig(theta=1e4)),) * 2,
    tied_embeddings=True,
)
SHAPES = tuple(
    StepShape(num_tokens=tokens, block_tokens=tokens, num_rows=1 if tokens == 1 else 4)
    for tokens in (1, 4, 16)
)


def engine_config(**changes) -> EngineConfig:
    sizes = dict(
        num_pages=40,
        page_size=8,
        context_len=96,
        evict_quantum=8,
        step_shapes=SHAPES,
        stretch_cells=(64, 16),
    )
    return EngineConfig(**(sizes | changes))


@functools.cache
def params() -> models.Params:
    return models.init_params(MODEL, seed=0)


def build(*, tokenizer=None, progress=None, **changes) -> Engine:
    """Start an engine; a silent cast between dtypes while it compiles is an error."""
    with jax.numpy_dtype_promotion("strict"):
        return Engine(
            params(), MODEL, engine_config(**changes), tokenizer=tokenizer, progress=progress
        )


@contextlib.contextmanager
def left_empty(engine: Engine) -> Iterator[Engine]:
    """Lend an engine that others use later: nothing may be held once its sessions are closed."""
    yield engine
    for session in engine.session_ids:
        engine.close(session)
    engine.verbs.prefixes.tree.clear()
    assert engine.cells_held == 0


class LetterTokenizer:
    """Token n is the n-th of a row of letters; the last id is a control token."""

    LETTERS = "abcdefghijklmnopqrstuvwxyzäöü"

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return self.LETTERS[token_id % len(self.LETTERS)].encode()

    def is_special(self, token_id: int) -> bool:
        return token_id == MODEL.vocab_size - 1

    def decode(self, ids, *, skip_special: bool = False) -> str:
        kept = [idx for idx in ids if not (skip_special and self.is_special(idx))]
        return b"".join(self.token_bytes(idx) for idx in kept).decode()


def dense_logits(token_ids) -> np.ndarray:
    """Logits after every token, by plain causal attention without a cache: [tokens, vocab]."""
    padded = np.zeros(MODEL.max_positions, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(_dense()(params(), padded))[: len(token_ids)]


@functools.cache
def _dense():
    return jax.jit(lambda tree, ids: models.plain_forward.logits(tree, MODEL, jnp.asarray(ids)))


def dense_logprobs(token_ids) -> np.ndarray:
    """Natural log-probabilities after every token, in float64."""
    logits = dense_logits(token_ids).astype(np.float64)
    peak = logits.max(axis=-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))


def greedy(token_ids, count: int) -> list[int]:
    """Continue a sequence by the dense forward's most likely tokens."""
    ids = list(token_ids)
    for _ in range(count):
        ids.append(int(dense_logits(ids)[-1].argmax()))
    return ids[len(token_ids) :]


def random_ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size - 1, count).tolist()


def state_of(engine: Engine) -> dict:
    """Everything a refused verb must leave alone, the bits of all seen cells included."""
    size = engine.config.page_size
    sessions = {}
    for name in engine.session_ids:
        session = engine.session(name)
        cells = [
            entry.page * size + cell
            for entries in (session.entries, *(paid.entries for paid in session.paid))
            for entry in entries
            for cell in range(entry.first, entry.fill)
        ]
        arrays = engine.executor.read_cells(np.asarray(cells, np.int64))
        sessions[name] = dict(
            token_ids=list(session.token_ids),
            entries=session.entries,
            version=session.version,
            evicted=session.evicted,
            stream_floor=session.stream_floor,
            frozen_len=session.frozen_len,
            paid=[(paid.token_ids, paid.entries) for paid in session.paid],
            bits=[part.tobytes() for layer in arrays for part in layer],
        )
    references = {
        page: engine.pages.header(page).references
        for page in range(engine.config.num_pages)
        if page in {e.page for s in sessions.values() for e in s["entries"]}
    }
    return dict(
        sessions=sessions,
        references=references,
        cells_held=engine.cells_held,
        cells_used=engine.cells_used,
    )
