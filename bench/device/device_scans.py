"""The gate scan: right, and how long it takes beside reading the output matrix once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import device_problem
import jax
import jax.numpy as jnp
import numpy as np
from common import Limit
from device_report import Bar
from device_run import Check, Run, run_checks
from device_sizes import Sizes
from device_timing import measure, noise

from jaxstate.kernels_pallas import dispatch
from jaxstate.kernels_pallas.gate_scan_xla import GateSummary

_CAPPED = {"scale": 0.5, "softcap": 20.0}
_CLOSE = Limit(op="<=", value=1e-4)  # of logits of standard deviation 1, an entropy of about 12
_EQUAL = Limit(op="==", value=0)


def checks(run: Run, dtypes: Sequence[str], rows: int, vocab: int, hidden_size: int) -> None:
    """Compare with plain XLA in f32, from hidden states and from logits.

    Operands of -1, 0 and 1 make sums exact and many logits equal: ids must be the lowest. Others
    show how close the numbers are.
    """
    run_checks(
        run,
        [
            scan_check(run, rows, vocab, hidden_size, dtype, source=source, ties=ties)
            for dtype in dtypes
            for source in ("gate_scan_hidden", "gate_scan")
            for ties in (True, False)
        ],
    )


def scan_check(
    run: Run, rows: int, vocab: int, hidden_size: int, dtype: str, *, source: str, ties: bool
) -> Check:
    """Return the check of one scan: "gate_scan_hidden" or "gate_scan", of ids or of numbers."""
    inputs: list[Any] = []

    def lower() -> list[Any]:
        if source == "gate_scan":
            operands = (_draw(rows, vocab, dtype, 20.0 if ties else 1.0, whole=ties),)
        else:
            operands = (
                _draw(rows, hidden_size, dtype, 0.8 if ties else 1.0, whole=ties),
                _draw(vocab, hidden_size, dtype, 0.8 if ties else hidden_size**-0.5, whole=ties),
            )
        inputs[:] = [*operands, *_sets(rows, vocab)]
        kernel = functools.partial(getattr(dispatch, source), run.kernels, **_CAPPED)
        plain = functools.partial(_plain, source)
        return [device_problem.lower(function, *inputs) for function in (kernel, plain)]

    def compare(kernel: Any, plain: Any) -> float:
        found, expected = kernel(*inputs), plain(*inputs)
        inputs.clear()
        return _ids_that_differ(found, expected) if ties else difference(found, expected)

    return Check(
        name=f"{source} {'ties' if ties else 'values'} {rows}x{vocab} {dtype}",
        lower=lower, compare=compare, limit=_EQUAL if ties else _CLOSE,
        unit="ids that differ" if ties else "largest difference", detail={},
    )  # fmt: skip


def _draw(rows: int, width: int, dtype: str, scale: float, *, whole: bool) -> jax.Array:
    """Draw operands; whole numbers if asked."""
    seed = np.uint32(rows + width)
    drawn = noise(seed, np.float32(scale), shape=(rows, width), dtype=dtype)
    return jnp.round(drawn) if whole else drawn


def _sets(rows: int, vocab: int) -> tuple[jax.Array, jax.Array]:
    """Sets of a 64th of the vocabulary, of its last token alone, and of all of it."""
    some = np.zeros((3, -(-vocab // 32) * 32), bool)
    some[0, :vocab] = np.random.default_rng(vocab).random(vocab) < 1 / 64
    some[1, vocab - 1] = True
    some[2] = True
    bits = np.packbits(some, axis=1, bitorder="little").view("<u4")
    return jnp.asarray(bits), jnp.arange(rows, dtype=jnp.int32) % 3


def _plain(source: str, *args: Any) -> GateSummary:
    """Plain XLA in f32."""
    *operands, bits, sets = args
    wide = [one.astype(jnp.float32) for one in operands]
    return getattr(dispatch, source)("xla", *wide, bits, sets, **_CAPPED)


def _ids_that_differ(found: GateSummary, expected: GateSummary) -> float:
    pairs = ((found.top_ids, expected.top_ids), (found.allowed_ids, expected.allowed_ids))
    return float(sum((np.asarray(a) != np.asarray(b)).sum() for a, b in pairs))


def difference(found: GateSummary, expected: GateSummary) -> float:
    """Return the largest difference of any number; both may be -inf, where a set is small."""
    names = ("top_logits", "allowed_logits", "lse", "entropy")
    worst = []
    for name in names:
        a, b = (np.asarray(getattr(summary, name)) for summary in (found, expected))
        with np.errstate(invalid="ignore"):
            worst.append(np.where(a == b, 0, np.abs(a - b)).max())
    return float(np.max(worst))


def hidden_timing(run: Run, name: str, vocab: int, hidden_size: int) -> None:
    """Time scans from hidden states at every number of rows: "kernel" or "xla"."""
    matrix = _draw(vocab, hidden_size, "bfloat16", hidden_size**-0.5, whole=False)
    for rows in run.sizes.rows:
        hidden = _draw(rows, hidden_size, "bfloat16", 1.0, whole=False)
        inputs = (hidden, matrix, *_sets(rows, vocab))
        flops = 2.0 * rows * vocab * hidden_size
        _timing(
            run, "gate_scan_hidden", name, inputs, _hidden_name(name, rows, vocab),
            matrix.nbytes, flops, rows=rows, vocab=vocab, hidden_size=hidden_size,
        )  # fmt: skip


def logits_timing(run: Run, name: str, vocab: int) -> None:
    """Time scans of logits at hand, f32."""
    for rows in run.sizes.rows:
        logits = _draw(rows, vocab, "float32", 1.0, whole=False)
        inputs = (logits, *_sets(rows, vocab))
        _timing(
            run, "gate_scan", name, inputs, f"gate logits {name} {rows}x{vocab}",
            logits.nbytes, 0.0, rows=rows, vocab=vocab,
        )  # fmt: skip


def _timing(
    run: Run, source: str, name: str, inputs: Any, key: str, num_bytes: int, flops: float,
    **detail: Any,
) -> None:  # fmt: skip
    function = functools.partial(getattr(dispatch, source), run.implementation(name))
    compiled = device_problem.lower(function, *inputs).compile()
    timing = measure(functools.partial(compiled, *inputs))
    floor = run.floor_ms(num_bytes, flops)
    run.report.timing(key, timing, floor, floor_bytes=num_bytes, floor_flops=flops, **detail)


def _hidden_name(name: str, rows: int, vocab: int) -> str:
    return f"gate hidden {name} {rows}x{vocab}"


def bar(found: dict[str, dict[str, Any]], sizes: Sizes) -> Bar | None:
    """h200.gate: the least share of the floor's speed, over all rows and vocabularies."""
    names = [
        _hidden_name("kernel", rows, vocab)
        for vocab, _ in sizes.vocabularies
        for rows in sizes.rows
    ]
    if not all(name in found for name in names):
        return None
    shares = {name: found[name]["floor_ms"] / found[name]["ms"] for name in names}
    return Bar(value=min(shares.values()), n=found[names[0]]["n"], detail=shares)
