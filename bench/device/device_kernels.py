"""Is each kernel right on this device? Against plain XLA in f32 on the same inputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import device_problem
import jax
import jax.numpy as jnp
import numpy as np
from common import Limit
from device_problem import Layout
from device_run import Check, Run, run_checks
from device_sizes import Heads, Sizes

from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection
from jaxstate.pages import Stretch
from jaxstate.rows import Group
from jaxstate.state import StepShape

# Rounding of weights and products in that dtype, relative to a token's largest number.
TOLERANCE = {"float32": Limit(op="<=", value=2e-5), "bfloat16": Limit(op="<=", value=2e-2)}
EQUAL = Limit(op="==", value=0)
_MOST_SHIFT = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An attention to check.

    Attributes:
      selected: share of the blocks that each key/value head may read; None = no selection.
      offset_pages: pages of NaN in front of the context.
    """

    name: str
    layout: Layout
    groups: Sequence[Group]
    selected: float | None = None
    offset_pages: int = 0


def attention_checks(run: Run, heads: Heads, dtype: str, *, real: bool) -> None:
    """Check every kind of attention at these heads."""
    checks = [
        attention_check(run, case, real) for case in cases(heads, dtype, run.sizes, real=real)
    ]
    run_checks(run, checks)


def cases(heads: Heads, dtype: str, sizes: Sizes, *, real: bool) -> list[Case]:
    """Decode, group, prefill, window and selection, over scattered and shifted stretches."""
    rng = np.random.default_rng(heads.head_dim)
    context = sizes.real_context if real else 150
    slot_cells = context // 4
    page_size = 64 if real else 16
    together = max(sizes.group_rows) if real else 8
    tokens = sizes.real_tokens if real else 32
    lengths = [context - 37 * index for index in range(8)] if real else [0, 1, 37, context]

    def case(name: str, tokens: int, block: int, slots: int, groups: Any, **fields: Any) -> Case:
        layout = Layout(
            heads=heads, dtype=dtype, num_pages=-(-slots * slot_cells // page_size),
            page_size=page_size, window=fields.pop("window", None),
            shape=StepShape(num_tokens=tokens, block_tokens=block, num_rows=1),
        )  # fmt: skip
        free = iter(rng.permutation(slots).tolist())
        return Case(name=name, layout=layout, groups=groups(free), **fields)

    def seen(length: int, free: Iterator[int]) -> list[Stretch]:
        return _scattered(rng, free, slot_cells, length)

    def decode(free: Iterator[int]) -> list[Group]:
        return [Group(rows=[device_problem.row(n, context=seen(n, free))]) for n in lengths]

    def group(free: Iterator[int]) -> list[Group]:
        """Each row sees a few cells of its own behind those that all of them see."""
        shared = seen(context, free)
        rows = []
        for own in range(together):
            behind = [one._replace(base=one.base + context) for one in seen(own, free)]
            rows.append(device_problem.row(context + own, context=behind))
        return [Group(rows=rows, context=shared)]

    def prefill(free: Iterator[int]) -> list[Group]:
        return [Group(rows=[device_problem.row(context, tokens, seen(context, free))])]

    rows = len(lengths)
    found = [
        case("decode", rows, 1, 8 * rows, decode),
        case("group", together, together, 8 + together, group),
        case("prefill", tokens, tokens, 8, prefill),
        case("decode in a window", rows, 1, 8 * rows, decode, window=context // 2),
        case("prefill in a window", tokens, tokens, 8, prefill, window=context // 8),
        case("half of the blocks", rows, 1, 8 * rows, decode, selected=0.5),
        case("all blocks", rows, 1, 8 * rows, decode, selected=1.0),
    ]
    if real and dtype == "bfloat16" and sizes.huge_pages:
        far = sizes.huge_pages
        found.append(case("decode far out", rows, 1, 8 * rows, decode, offset_pages=far))
    return found


def _scattered(
    rng: np.random.Generator, free: Iterator[int], slot_cells: int, length: int
) -> list[Stretch]:
    """Lay positions 0 … length - 1 into free slots of the pool, each with a shift of its own."""
    found: list[Stretch] = []
    position = 0
    while position < length:
        begin = next(free) * slot_cells + int(rng.integers(0, slot_cells // 4))
        count = min(slot_cells * 3 // 4, length - position)
        shift = int(rng.integers(-_MOST_SHIFT, _MOST_SHIFT + 1))
        found.append(Stretch(begin=begin, end=begin + count, base=position - begin, shift=shift))
        position += count
    return found


def attention_check(run: Run, case: Case, real: bool) -> Check:
    """Compare with plain XLA; where all blocks are selected, bitwise with no selection."""
    name, layout = run.kernels, case.layout
    offset = case.offset_pages * layout.page_size
    whole = dataclasses.replace(layout, num_pages=layout.num_pages + case.offset_pages)
    against_itself = case.selected == 1.0
    inputs: list[Any] = []

    def lower() -> list[Any]:
        run.require("kernel", layout.heads.head_dim, layout.dtype)
        chosen, selection = _selection(case)
        tokens = layout.tokens(1)
        pools = _poisoned(whole, _seen(case, chosen), offset)
        moved = whole.pack([_moved(group, offset) for group in case.groups], name)
        plain = layout.pack(case.groups, "xla")
        kernel = functools.partial(device_problem.attention, name, whole)
        if against_itself:
            inputs[:] = [(tokens, pools, moved, selection), (tokens, pools, moved, None)]
            functions = [kernel, kernel]
        else:
            reference = functools.partial(_reference, layout)
            inputs[:] = [(tokens, pools, moved, selection), (tokens, pools, plain, selection)]
            functions = [kernel, reference]
        return [
            device_problem.lower(function, *args)
            for function, args in zip(functions, inputs, strict=True)
        ]

    def compare(kernel: Any, reference: Any) -> float:
        found, expected = (
            np.asarray(function(*args))
            for function, args in zip((kernel, reference), inputs, strict=True)
        )
        inputs.clear()
        if against_itself:
            return float((found.view(np.uint32) != expected.view(np.uint32)).sum())
        return difference(found, expected)

    return Check(
        name=f"attention {case.name} {'real' if real else 'small'} {layout.dtype} "
        f"{layout.heads.head_dim}",
        lower=lower, compare=compare,
        limit=EQUAL if against_itself else TOLERANCE[layout.dtype],
        unit="numbers that differ" if against_itself else "x the token's largest number",
        detail={"implementation": name, "heads": dataclasses.asdict(layout.heads)},
    )  # fmt: skip


def _reference(layout: Layout, tokens: Any, pools: Any, rows: Any, selection: Any) -> jax.Array:
    """The same in plain XLA and f32, over the last pages of the pool."""
    wide = dataclasses.replace(layout, dtype="float32")
    tokens = tuple(one.astype(jnp.float32) for one in tokens)
    pools = [
        tuple(pages[:, -layout.num_pages :].astype(jnp.float32) for pages in pair) for pair in pools
    ]
    return device_problem.attention("xla", wide, tokens, pools, rows, selection)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, as a multiple of the largest number of the same token."""
    size = np.abs(expected).max(axis=(1, 2))
    worst = np.abs(found - expected).max(axis=(1, 2))
    if (worst[size == 0] != 0).any():
        return float("inf")
    return float((worst / np.where(size == 0, 1, size)).max())


def _selection(case: Case) -> tuple[np.ndarray, Selection | None]:
    """Draw each head's blocks: [num_kv_heads, cells] bool, and the lists."""
    heads, num_pages, page_size, _ = case.layout.pages_shape
    blocks = num_pages * page_size // BLOCK_CELLS
    if case.selected is None:
        return np.ones((heads, blocks * BLOCK_CELLS), bool), None
    rng = np.random.default_rng(blocks)
    chosen = rng.random((heads, blocks)) < case.selected
    lists = np.full((heads, blocks), 2**30, np.int32)  # what is past a count is not read
    for head, some in enumerate(chosen):
        lists[head, : some.sum()] = np.flatnonzero(some)
    counts = chosen.sum(axis=1).astype(np.int32)
    selection = Selection(blocks=jnp.asarray(lists), count=jnp.asarray(counts))
    return np.repeat(chosen, BLOCK_CELLS, axis=1), selection


def _seen(case: Case, chosen: np.ndarray) -> np.ndarray:
    """[num_kv_heads, cells] bool: which cells some row sees and the head's list names."""
    seen = np.zeros(chosen.shape[1], bool)
    for one in device_problem.all_stretches(case.groups):
        seen[one.begin : one.end] = True
    return chosen & seen


def _poisoned(layout: Layout, seen: np.ndarray, offset: int) -> list[tuple[jax.Array, jax.Array]]:
    """Draw keys and values; NaN in every cell that must not be read."""
    heads, _, page_size, _ = layout.pages_shape
    seen = np.concatenate([np.zeros((heads, offset), bool), seen], axis=1)
    mask = jnp.asarray(seen.reshape(heads, -1, page_size, 1))
    return [(_poison(layout.pages(11), mask), _poison(layout.pages(12), mask))]


@functools.partial(jax.jit, donate_argnums=(0,))
def _poison(pages: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, pages, jnp.asarray(jnp.nan, pages.dtype))


def _moved(group: Group, offset: int) -> Group:
    """The same group with its cells farther out in the pool."""

    def moved(context: Sequence[Stretch]) -> list[Stretch]:
        return [
            Stretch(s.begin + offset, s.end + offset, s.base - offset, s.shift) for s in context
        ]

    rows = [dataclasses.replace(row, context=moved(row.context)) for row in group.rows]
    return Group(rows=rows, context=moved(group.context))
