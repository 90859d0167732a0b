"""One session as a pytree: append, advance and query as pure, jitted functions.

For notebooks, research and accelerators driven by hand: everything here runs inside `jax.jit`,
`jax.lax.scan` over ticks and `jax.vmap` over sessions, and Orbax saves the state as it is. Many
sessions of different lengths in one process are the engine's business (`jaxstate.Engine`), which
shares the step with this module.

    config = SessionConfig(model=model.config, page_size=64, context_len=4096, tail_len=256,
                           evict_quantum=512, when_full="slide")
    state = start(params, config, frozen_ids)
    state = append(params, state, row_ids)
    state, answer = query(params, state, question_ids, max_new_tokens=8)

The three functions donate the state: rebind it at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, get_args

import flax.struct
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import platformdirs

from jaxstate import sampling as sampling_module
from jaxstate.errors import CapacityError, InputError
from jaxstate.kernels_pallas import dispatch
from jaxstate.kernels_pallas.gate_scan_xla import GateSummary
from jaxstate.kernels_pallas.work import PADDING_ROW, WorkList
from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params
from jaxstate.sampling import Sampling
from jaxstate.state import Outputs, Pool, Rows, StepShape, init_pool
from jaxstate.step import step


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Sizes of a functional session.

    Attributes:
      model: the decoder.
      page_size: cells of a page.
      context_len: most tokens kept, frozen prefix and stream.
      tail_len: most tokens of a paid entry, a question and its answer together.
      evict_quantum: a sliding session drops its oldest tokens in multiples of this.
      when_full: what an append beyond context_len does. Under "error" it raises; traced inside a
        transformation, where nothing can be raised, it leaves the state as it was, version too.
      chunk_tokens: most tokens forwarded in one step.
      stretch_cells: cells that attention reads at a time.
      implementation: of the kernels, any of kernels_pallas.dispatch but "auto"; only "xla" can be
        vmapped.
    """

    model: ModelConfig
    page_size: int
    context_len: int
    tail_len: int
    evict_quantum: int
    when_full: Literal["error", "slide"]
    chunk_tokens: int = 512
    stretch_cells: int = 512
    implementation: dispatch.Implementation = "xla"

    def __post_init__(self):
        """Check that sizes fit each other and the model."""
        for name in ("page_size", "context_len", "tail_len", "evict_quantum", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.context_len + self.tail_len > self.model.max_positions:
            raise ValueError(
                f"context_len + tail_len: expected at most the model's "
                f"{self.model.max_positions} positions, got {self.context_len + self.tail_len}"
            )
        names = [name for name in get_args(dispatch.Implementation) if name != "auto"]
        if self.implementation not in names:
            raise ValueError(
                f"implementation: expected one of {', '.join(names)}, got {self.implementation}"
            )
        if self.when_full not in ("error", "slide"):
            raise ValueError(f'when_full: expected "error" or "slide", got "{self.when_full}"')

    @property
    def num_pages(self) -> int:
        """Pages for context and tail, wherever the frozen prefix and the ring begin and end."""
        return -(-(self.context_len + self.tail_len) // self.page_size) + 3

    @property
    def num_cells(self) -> int:
        """Cells of all pages."""
        return self.num_pages * self.page_size


class SessionState(flax.struct.PyTreeNode):
    """A session as a pytree.

    Frozen tokens lie on the first pages; the stream's n-th token ever lies in a ring behind them,
    so that the table is a closed form of the scalars below. Cells past `length` are scratch.

    Attributes:
      pool: pages of every layer.
      token_ids: [context_len] int32, frozen and kept stream tokens by position; the truth.
      frozen_len: [] int32, tokens that are never evicted.
      length: [] int32, tokens in the context.
      evicted: [] int32, stream tokens dropped so far.
      paid_len: [] int32, tokens forwarded ahead behind the context.
      ready: the distribution after the paid tokens (one row).
      version: [] int32, number of durable operations.
      config: static.
    """

    pool: Pool
    token_ids: jax.Array
    frozen_len: jax.Array
    length: jax.Array
    evicted: jax.Array
    paid_len: jax.Array
    ready: Outputs
    version: jax.Array
    config: SessionConfig = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class FunctionalAnswer:
    """What `query` returns.

    Attributes:
      token_ids: [max_new_tokens] int32; -1 behind the answer's end.
      num_tokens: [] int32, tokens drawn, an end token included.
      first: the distribution the first token was drawn from (one row).
    """

    token_ids: jax.Array
    num_tokens: jax.Array
    first: Outputs


def init_state(config: SessionConfig) -> SessionState:
    """Allocate an empty session.

    Raises:
      NotImplementedError: `config.implementation` cannot run here.
    """
    dispatch.choose(
        config.implementation, config.model.head_dim, config.model.dtypes.cache_dtype,
        platformdirs.user_cache_path("jaxstate") / "kernels", page_size=config.page_size,
    )  # fmt: skip
    vocab = config.model.vocab_size

    def zero():
        return jnp.zeros((), jnp.int32)

    pair = (1, 2)
    summary = GateSummary(
        top_ids=jnp.zeros(pair, jnp.int32),
        top_logits=jnp.zeros(pair, jnp.float32),
        lse=jnp.zeros(1, jnp.float32),
        entropy=jnp.zeros(1, jnp.float32),
        allowed_ids=jnp.zeros(pair, jnp.int32),
        allowed_logits=jnp.zeros(pair, jnp.float32),
    )
    return SessionState(
        pool=init_pool(config.model, config.num_pages, config.page_size),
        token_ids=jnp.zeros(config.context_len, jnp.int32),
        frozen_len=zero(),
        length=zero(),
        evicted=zero(),
        paid_len=zero(),
        ready=Outputs(summary=summary, logits=jnp.zeros((1, vocab), jnp.float32)),
        version=zero(),
        config=config,
    )


def start(params: Params, config: SessionConfig, frozen: Sequence[int] = ()) -> SessionState:
    """Open a session whose context starts with `frozen`, which is never evicted.

    Raises:
      CapacityError: the prefix leaves no room.
      InputError: a token id out of range.
    """
    state = init_state(config)
    if len(frozen) == 0:
        return state
    if len(frozen) >= config.context_len:
        raise CapacityError(
            f"frozen: expected less than context_len={config.context_len} tokens, "
            f"got {len(frozen)}; shorten the prefix or raise context_len"
        )
    state = state.replace(frozen_len=jnp.asarray(len(frozen), jnp.int32))
    return append(params, state, frozen).replace(version=jnp.zeros((), jnp.int32))


def append(
    params: Params,
    state: SessionState,
    token_ids: jax.Array | Sequence[int],
    num_tokens: jax.Array | int | None = None,
) -> SessionState:
    """Feed known tokens to the stream; donates the state.

    Args:
      token_ids: [n] int32.
      num_tokens: [] int32, how many of them count (the rest is padding); None = all.
    Raises:
      InputError: no tokens, or ids out of range (not checked when traced).
      CapacityError: they do not fit, see SessionConfig.when_full (not when traced).
    """
    ids, count = _tokens(state, token_ids, num_tokens, "append")
    values = (state.length, state.frozen_len, count)
    if not any(isinstance(value, jax.core.Tracer) for value in values):
        _check_room(state.config, *(int(value) for value in values))
    return _append(params, state, ids, count)


def advance(
    params: Params,
    state: SessionState,
    entry: jax.Array | Sequence[int],
    num_tokens: jax.Array | int | None = None,
) -> tuple[SessionState, Outputs]:
    """Forward tokens a request is expected to bring, and keep the distribution behind them.

    Donates the state. The next append drops what was paid.

    Args:
      entry, num_tokens: as in `append`.
    Returns:
      state, with paid_len and ready set.  ready: the distribution after the entry.

    Source: speculative pre-positioning (arXiv:2606.29565).
    """
    ids, count = _tokens(state, entry, num_tokens, "entry")
    if ids.shape[0] > state.config.tail_len:
        raise CapacityError(
            f"entry: expected at most tail_len={state.config.tail_len} tokens, got {ids.shape[0]}"
        )
    return _advance(params, state, ids, count)


def query(
    params: Params,
    state: SessionState,
    question: jax.Array | Sequence[int],
    num_tokens: jax.Array | int | None = None,
    *,
    max_new_tokens: int,
    resume: bool = False,
    sampling: Sampling | None = None,
    eos_ids: tuple[int, ...] = (),
) -> tuple[SessionState, FunctionalAnswer]:
    """Ask; the visible session is unchanged. Donates the state.

    Args:
      question, num_tokens: as in `append`; with `resume` the question may be empty: then the
        answer begins with the ready distribution and forwards nothing for its first token.
      max_new_tokens: static length of the answer.
      resume: the question continues the paid entry of `advance` instead of the context.
      sampling: how tokens are drawn; greedy by default.
      eos_ids: tokens that end the answer.
    Raises:
      CapacityError: question and answer exceed tail_len.
      InputError: an empty question without `resume`.
    """
    config = state.config
    if len(question) == 0 and resume:
        ids, count = jnp.zeros(0, jnp.int32), jnp.zeros((), jnp.int32)
    else:
        ids, count = _tokens(state, question, num_tokens, "question")
    needed = ids.shape[0] + max_new_tokens
    if resume and not isinstance(state.paid_len, jax.core.Tracer):
        needed += int(state.paid_len)
    if max_new_tokens < 1 or needed > config.tail_len:
        raise CapacityError(
            f"query: expected paid entry, question and answer to fit tail_len={config.tail_len}, "
            f"got {needed} tokens of which max_new_tokens={max_new_tokens}"
        )
    settings = sampling or Sampling()
    bias = jnp.zeros(config.model.vocab_size, jnp.float32)
    if settings.logit_bias:
        bias = bias.at[np.array(list(settings.logit_bias), np.int32)].set(
            np.array(list(settings.logit_bias.values()), np.float32)
        )
    knobs = (
        bias,
        jnp.float32(settings.temperature),
        jnp.int32(settings.top_k),
        jnp.float32(settings.top_p),
        jnp.float32(settings.min_p),
        jnp.uint32(settings.seed),
    )
    return _query(
        params,
        state,
        ids,
        count,
        knobs,
        max_new_tokens=max_new_tokens,
        resume=resume,
        greedy=settings.is_plain_greedy,
        eos_ids=tuple(eos_ids),
    )


def table(state: SessionState, visible: jax.Array) -> WorkList:
    """Return the work list of the first `visible` positions: the session's table, in closed form.

    Frozen position p is cell p; stream token n is cell `ring_start + n mod ring_cells`, stands
    at frozen_len + n - evicted and is stored rotated at frozen_len + n mod epoch (see
    session.stream_shifts).
    """
    config = state.config
    ring_start, ring_cells, epoch = _ring(state)
    first = state.evicted
    last = state.evicted + jnp.maximum(visible - state.frozen_len, 0)
    # The stream breaks where the ring wraps and where an epoch of stored rotations ends; a window
    # is at most one ring and a little over one epoch long, so it breaks three times at most.
    next_wrap = (first // ring_cells + 1) * ring_cells
    next_epoch = (first // epoch + 1) * epoch
    breaks = jnp.stack([next_wrap, next_epoch, next_epoch + epoch])
    edges = jnp.sort(jnp.concatenate([first[None], jnp.clip(breaks, first, last), last[None]]))
    begin, end = edges[:-1], edges[1:]  # [4], in stream tokens
    cell = ring_start + begin % ring_cells
    zero = jnp.zeros(1, jnp.int32)
    cells_begin = jnp.concatenate([zero, cell])
    lengths = jnp.concatenate([jnp.minimum(state.frozen_len, visible)[None], end - begin])
    bases = jnp.concatenate([zero, state.frozen_len + begin - state.evicted - cell])
    shifts = jnp.concatenate([zero, begin // epoch * epoch - state.evicted])
    size = min(config.stretch_cells, config.num_cells)
    capacity = -(-config.num_cells // size) + len(breaks) + 2
    counts = -(-lengths // size)
    ends = jnp.cumsum(counts)
    item = jnp.arange(capacity, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, item, side="right"), lengths.shape[0] - 1)
    done = (item - (ends - counts)[owner]) * size
    at = cells_begin[owner] + done
    start_cell = jnp.minimum(at, config.num_cells - size)
    offset = at - start_cell
    fill = offset + jnp.minimum(lengths[owner] - done, size)
    columns = (
        start_cell,
        offset,
        fill,
        bases[owner] + start_cell,
        shifts[owner],
        jnp.zeros_like(item),
        jnp.ones_like(item),
        jnp.zeros_like(item),
    )
    items = jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)
    return WorkList(items=items, count=ends[-1].astype(jnp.int32), cells_per_item=size)


def _ring(state: SessionState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First cell and length of the stream's ring, and the rotation epoch, in cells."""
    size = state.config.page_size
    frozen_pages = -(-state.frozen_len // size)
    epoch = jnp.maximum((state.config.model.max_positions - state.frozen_len) // size * size, size)
    return frozen_pages * size, (state.config.num_pages - frozen_pages) * size, epoch


def _tokens(state: SessionState, token_ids, num_tokens, what: str):
    """Check concrete token ids; return them and their count as arrays."""
    vocab = state.config.model.vocab_size
    if not isinstance(token_ids, jax.Array):
        token_ids = np.asarray(token_ids)
        if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= vocab):
            raise InputError(f"{what}: expected token ids in 0 … {vocab - 1}, got others")
        token_ids = jnp.asarray(token_ids.astype(np.int32))
    if token_ids.ndim != 1 or token_ids.shape[0] == 0:
        raise InputError(f"{what}: expected a flat list of token ids, got shape {token_ids.shape}")
    count = token_ids.shape[0] if num_tokens is None else num_tokens
    return token_ids.astype(jnp.int32), jnp.asarray(count, jnp.int32)


def _check_room(config: SessionConfig, length: int, frozen_len: int, count: int) -> None:
    overflow = length + count - config.context_len
    if overflow > 0 and config.when_full == "error":
        raise CapacityError(
            f"append: {length} of {config.context_len} tokens are held and {count} more do not "
            'fit; use when_full="slide" or a larger context_len'
        )
    if count > config.context_len - frozen_len:
        raise CapacityError(
            f"append: {count} tokens are longer than the stream's window of "
            f"{config.context_len - frozen_len}; split them or use a larger context_len"
        )


def _forward(
    params: Params,
    state: SessionState,
    token_ids: jax.Array,
    position: jax.Array,
    count: jax.Array,
    *,
    wanted: bool,
) -> tuple[Pool, Outputs]:
    """Run one step over token_ids [T], of which `count` are real, at `position` and following."""
    config = state.config
    tokens = token_ids.shape[0]
    ring_start, ring_cells, epoch = _ring(state)
    index = jnp.arange(tokens, dtype=jnp.int32)
    positions = position + index
    stream = positions - state.frozen_len + state.evicted
    frozen = positions < state.frozen_len
    cells = jnp.where(frozen, positions, ring_start + stream % ring_cells)
    shifts = jnp.where(frozen, 0, stream // epoch * epoch - state.evicted)
    real = index < count
    rows = Rows(
        token_ids=token_ids,
        positions=positions,
        token_rows=jnp.where(real, 0, PADDING_ROW),
        selects=jnp.zeros(tokens, bool),
        write_cells=jnp.where(real, cells, config.num_cells),
        write_shifts=shifts,
        tail_mask=index[:, None] >= index[None, :],
        work=(table(state, position),),
        output_tokens=jnp.maximum(count - 1, 0)[None],
        num_outputs=jnp.asarray(1 if wanted else 0, jnp.int32),
        allowed_idx=jnp.zeros(1, jnp.int32),
    )
    everything = jnp.full((1, -(-config.model.vocab_size // 32)), 0xFFFFFFFF, jnp.uint32)
    shape = StepShape(num_tokens=tokens, block_tokens=tokens, num_rows=1)
    return step(
        params, state.pool, rows, everything, config=config.model, shape=shape,
        implementation=config.implementation,
    )  # fmt: skip


def _forward_all(
    params: Params,
    state: SessionState,
    token_ids: jax.Array,
    position: jax.Array,
    count: jax.Array,
    *,
    wanted: bool,
) -> tuple[Pool, Outputs]:
    """Forward any number of tokens: whole chunks in a scan, what is left in one more step.

    The distribution after token count - 1 is taken from the step that holds it.
    """
    chunk = state.config.chunk_tokens
    total = token_ids.shape[0]
    if total <= chunk:
        return _forward(params, state, token_ids, position, count, wanted=wanted)
    padded = jnp.pad(token_ids, (0, -total % chunk)).reshape(-1, chunk)

    def one(carry, chunk_ids):
        pool, done, kept = carry
        here = jnp.clip(count - done, 0, chunk)
        pool, outputs = _forward(
            params, state.replace(pool=pool), chunk_ids, position + done, here, wanted=wanted
        )
        kept = jax.tree.map(lambda new, old: jnp.where(here > 0, new, old), outputs, kept)
        return (pool, done + chunk, kept), None

    carry = (state.pool, jnp.zeros((), jnp.int32), state.ready)
    (pool, _, outputs), _ = jax.lax.scan(one, carry, padded)
    return pool, outputs


@functools.partial(jax.jit, donate_argnames=("state",))
def _append(params, state: SessionState, token_ids, count) -> SessionState:
    config = state.config
    kept = state.length - state.frozen_len
    overflow = state.length + count - config.context_len
    fits = count <= config.context_len - jnp.where(state.length == 0, 0, state.frozen_len)
    if config.when_full == "error":
        fits &= overflow <= 0
    count = jnp.where(fits, count, 0)
    quantum = config.evict_quantum
    dropped = jnp.where(fits & (overflow > 0), -(-overflow // quantum) * quantum, 0)
    dropped = jnp.minimum(dropped, jnp.maximum(kept, 0))
    place = jnp.arange(config.context_len, dtype=jnp.int32)
    source = jnp.where(place < state.frozen_len, place, place + dropped)
    ids = state.token_ids.at[source].get(mode="fill", fill_value=0)
    state = state.replace(
        token_ids=ids, evicted=state.evicted + dropped, length=state.length - dropped
    )
    pool, _ = _forward_all(params, state, token_ids, state.length, count, wanted=False)
    index = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    target = jnp.where(index < count, state.length + index, config.context_len)
    return state.replace(
        pool=pool,
        token_ids=state.token_ids.at[target].set(token_ids, mode="drop"),
        length=state.length + count,
        paid_len=jnp.where(fits, 0, state.paid_len),
        version=state.version + fits.astype(jnp.int32),
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def _advance(params, state: SessionState, token_ids, count):
    pool, ready = _forward_all(params, state, token_ids, state.length, count, wanted=True)
    return state.replace(pool=pool, paid_len=count, ready=ready), ready


@functools.partial(
    jax.jit,
    donate_argnames=("state",),
    static_argnames=("max_new_tokens", "resume", "greedy", "eos_ids"),
)
def _query(
    params,
    state: SessionState,
    token_ids,
    count,
    knobs,
    *,
    max_new_tokens: int,
    resume: bool,
    greedy: bool,
    eos_ids: tuple[int, ...],
):
    position = state.length + (state.paid_len if resume else 0)
    pool, first = state.pool, state.ready
    if token_ids.shape[0]:
        pool, first = _forward_all(params, state, token_ids, position, count, wanted=True)
    position = position + count

    def pick(outputs: Outputs, at) -> jax.Array:
        if greedy:
            return outputs.summary.top_ids[0, 0]
        assert outputs.logits is not None, "every step here computes them"
        bias, temperature, top_k, top_p, min_p, seed = knobs
        return sampling_module.draw(
            outputs.logits[0], bias, temperature, top_k, top_p, min_p, seed, at
        )

    def ends(token) -> jax.Array:
        found = jnp.zeros((), bool)
        for eos_id in eos_ids:
            found |= token == eos_id
        return found

    def one(carry, offset):
        pool, token, done = carry
        at = position + offset
        pool, outputs = _forward(
            params,
            state.replace(pool=pool),
            token[None],
            at,
            1 - done.astype(jnp.int32),
            wanted=True,
        )
        following = jnp.where(done, -1, pick(outputs, at + 1))
        done |= ends(following)
        return (pool, jnp.maximum(following, 0), done), following

    token = pick(first, position)
    carry = (pool, token, ends(token))
    offsets = jnp.arange(max_new_tokens - 1, dtype=jnp.int32)
    (pool, _, _), rest = jax.lax.scan(one, carry, offsets)
    answer_ids = jnp.concatenate([token[None], rest])
    # A paid entry survives a query that continued it or wrote elsewhere; one that was written
    # over by a question from the context's end is gone.
    paid_len = state.paid_len if resume else jnp.zeros_like(state.paid_len)
    answer = FunctionalAnswer(
        token_ids=answer_ids,
        num_tokens=(answer_ids >= 0).sum(dtype=jnp.int32),
        first=first,
    )
    return state.replace(pool=pool, paid_len=paid_len), answer
