"""What all benchmarks share: JSON lines, bars, statistics, facts about the machine, its floors."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from jaxstate.answer import Answer
from jaxstate.models.config import ModelConfig
from jaxstate.serving import candle_rows

ROOT = pathlib.Path(__file__).resolve().parent.parent
TASK_MODEL = candle_rows.MODEL
MAX_OTHER_SHARE = 0.03  # of all processors; an idle machine's own threads take below 0.01
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


# Output


def note(text: str) -> None:
    """Print a line for people to stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """What a bar's number must satisfy.

    Attributes:
      op: "<=", ">=", "<" or "==".
      value: the limit itself.
      goal: a stricter wish, or None.
    """

    op: str
    value: Any
    goal: Any = None

    def holds(self, measured: Any) -> bool:
        """Whether a number is within the limit."""
        if self.op == "==":
            return measured == self.value
        return {
            "<=": measured <= self.value, ">=": measured >= self.value, "<": measured < self.value
        }[self.op]

    def __str__(self):
        """Write it as people do, e.g. "<= 1.25"."""
        return f"{self.op} {self.value}"


class Report:
    """Writes one JSON object per line to stdout, and to a file if there is one."""

    def __init__(self, bench: str, *, command: str, quick: bool, path: pathlib.Path | None):
        """Start a report; `command` is how a reader gets the same lines."""
        self._bench = bench
        self._command = command
        self._quick = quick
        self._commit = commit()
        self._out: list[TextIO] = [sys.stdout]
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._out.append(path.open("w", encoding="utf-8"))
        self.bars: list[dict[str, Any]] = []

    def line(self, **fields: Any) -> None:
        """Write a measurement."""
        self._write({"bench": self._bench, **fields, "utc": utc()})

    def bar(
        self, name: str, measured: Any, limit: Limit, *, unit: str, n: int,
        sound: bool = True, spoiled: str | None = None, **detail: Any,
    ) -> None:
        """Write a bar that was measured.

        Args:
          sound: whether all else that the bar asks for is true, see its detail.
          spoiled: why the number cannot be trusted; it then neither holds nor fails.
          detail: what the number was made of.
        """
        holds = None if spoiled else sound and limit.holds(measured)
        self._write_bar(
            name, measured, limit, unit=unit, n=n, holds=holds, reason=spoiled, detail=detail
        )

    def no_bar(self, name: str, limit: Limit, *, unit: str, reason: str) -> None:
        """Write a bar that was not measured, and why."""
        self._write_bar(name, None, limit, unit=unit, n=0, holds=None, reason=reason)

    def _write_bar(self, name: str, measured: Any, limit: Limit, **fields: Any) -> None:
        bar = {
            "bar": name, "measured": measured, "unit": fields.pop("unit"), "n": fields.pop("n"),
            "limit": str(limit), "goal": limit.goal, "holds": fields.pop("holds"),
            "command": self._command, "commit": self._commit,
            **{key: value for key, value in fields.items() if value},
        }
        if self._quick:
            bar["quick"] = True
        self.bars.append(bar)
        self._write(bar)

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(_rounded(line))
        for out in self._out:
            print(text, file=out, flush=True)

    def table(self) -> None:
        """Print the bars for people to stderr."""
        note(f"\n{'bar':<24}{'measured':>12}  {'limit':<14}{'goal':<8}{'':<6}unit")
        for bar in self.bars:
            value = bar["measured"]
            unknown = "-" if value is None else "void"
            verdict = {True: "ok", False: "MISS", None: unknown}[bar["holds"]]
            if isinstance(value, float):
                value = f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
            elif not isinstance(value, int) and value is not None:
                value = "see line"
            limit = bar["limit"] if len(bar["limit"]) <= 12 else bar["limit"][:2] + " …"
            goal = "" if bar["goal"] is None else str(bar["goal"])
            note(
                f"{bar['bar']:<24}{value if value is not None else '-':>12}  {limit:<14}{goal:<8}"
                f"{verdict:<6}{bar['unit']}"
                + (f"  ({bar['reason']})" if bar.get("reason") else "")
            )


def _rounded(value: Any) -> Any:
    """Cut floats to five digits, which no measurement here exceeds."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


# Statistics


def median(samples: Iterable[float]) -> float:
    """Return the median."""
    return float(statistics.median(samples))


def p90(samples: Sequence[float]) -> float:
    """Return the 90th percentile."""
    return float(np.percentile(samples, 90))


def spread(name: str, samples: Sequence[float]) -> dict[str, Any]:
    """Return a measurement's fields: median, p90 and all samples, named after it."""
    return {
        f"{name}_ms": median(samples), f"{name}_p90_ms": p90(samples),
        f"{name}_samples_ms": list(samples),
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median slope of all pairs of points: one disturbed point does not tilt it.

    Source: Theil-Sen estimator, doi:10.1080/01621459.1968.10480934.
    """
    pairs = itertools.combinations(zip(x, y, strict=True), 2)
    return median([(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs])


def milliseconds(function: Callable[[], Any]) -> float:
    """Call a function that blocks until its work is done; return how long it took."""
    began = time.perf_counter()
    function()
    return (time.perf_counter() - began) * 1e3


# Answers

NEAR_TIE = 2e-3  # logits between the first two, in 32-bit floats


def sure_len(answer: Answer) -> int:
    """Tokens of an answer with top_logprobs=2 before the first that another was as likely as."""
    for index, token in enumerate(answer.tokens):
        first, second = sorted((token.top_logprobs or {}).values(), reverse=True)
        if first - second < NEAR_TIE:
            return index
    return len(answer.tokens)


# Facts


def commit() -> str:
    """Return the commit that is measured, with "-dirty" if files were changed since."""
    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    return f"{head}-dirty" if git("status", "--porcelain") else head


def utc() -> str:
    """Return the time as ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def machine_facts() -> dict[str, Any]:
    """Return device, processor and versions."""
    return {
        "device": jax.devices()[0].device_kind, "platform": jax.devices()[0].platform,
        "processor": _processor(), "cpu_count": os.cpu_count(), "jax": jax.__version__,
        "commit": commit(),
    }


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def resident_bytes() -> int:
    """Return this process's resident memory; 0 where the system does not tell."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def start(bench: str, description: str, *, quick: str) -> tuple[argparse.Namespace, Report]:
    """Read --quick and --out, and begin a report with the facts of the machine.

    Args:
      bench: bench_<bench>.py.
      quick: what is less of with --quick.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    command = f"python bench/bench_{bench}.py" + (" --quick" if args.quick else "")
    report = Report(bench, command=command, quick=args.quick, path=args.out)
    report.line(arm="machine", **machine_facts())
    return args, report


class OtherLoad:
    """Processor time that went to processes other than ours, which spoils timings.

    Other engines suffer more than ours does when a core is missing, so a ratio is spoiled, too.

    Attributes:
      spoiled: what was disturbed, by phase; empty on a quiet machine.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]):
        """Start; `pids` names our running processes besides this one."""
        self._pids = pids
        self._last = self._read(), time.perf_counter()
        self.spoiled: dict[str, str] = {}

    def end(self, phase: str) -> float:
        """End a phase, which began when the last one ended.

        Returns:
          processor seconds that others took, steal included.
        """
        now = self._read(), time.perf_counter()
        others = max(now[0] - self._last[0], 0.0)
        share = others / ((now[1] - self._last[1]) * (os.cpu_count() or 1))
        self._last = now
        if share > MAX_OTHER_SHARE:
            self.spoiled[phase] = f"others took {share:.0%} of the processor during {phase}"
        return others

    def reason(self, phase: str) -> str | None:
        """Return why a phase's timings cannot be trusted, None if they can."""
        found = [text for name, text in self.spoiled.items() if name.startswith(phase)]
        return f"{found[0]}; run again" if found else None

    def _read(self) -> float:
        tick = os.sysconf("SC_CLK_TCK")
        try:
            fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return 0.0
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[:8])
        busy = user + nice + system + irq + softirq + steal
        for pid in (os.getpid(), *self._pids()):
            try:
                own = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            busy -= sum(int(field) for field in own[11:15])  # with children that have ended
        return busy / tick


class CompileCount:
    """Counts programs that XLA compiles or fetches from its cache."""

    def __init__(self):
        """Start at zero."""
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1


# Floors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floors:
    """What the machine can do at best, measured in the same run.

    Attributes:
      read_bytes_per_s: best rate of reading memory, far more of it than caches hold.
      copy_bytes_per_s: best rate of copying, bytes read plus bytes written.
      flops_per_s: f32 rate of a large square matrix product.
      shapes_flops_per_s: f32 rates of the products a step makes, by name.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: float
    shapes_flops_per_s: dict[str, float]

    def best(self, other: Floors) -> Floors:
        """Return the better of each rate: a floor that was disturbed is too easy to meet."""
        return Floors(
            read_bytes_per_s=max(self.read_bytes_per_s, other.read_bytes_per_s),
            copy_bytes_per_s=max(self.copy_bytes_per_s, other.copy_bytes_per_s),
            flops_per_s=max(self.flops_per_s, other.flops_per_s),
            shapes_flops_per_s={
                name: max(rate, other.shapes_flops_per_s[name])
                for name, rate in self.shapes_flops_per_s.items()
            },
        )


def measure_floors(model: ModelConfig, num_tokens: int, cells: int) -> Floors:
    """Measure bandwidths and matrix product rates; takes seconds.

    Args:
      model: whose shapes to multiply.
      num_tokens: tokens of a question.
      cells: cells that attention reads at once.
    """
    big = jnp.ones((64 * 1024, 2048), jnp.float32)  # 512 MB
    row = jnp.ones((1, big.shape[1]), jnp.float32)
    host = np.ones(big.shape, np.float32)
    target = np.empty_like(host)
    add = jax.jit(lambda x: x + 1)
    product = jax.jit(_product)
    reads = [
        _best_s(jax.jit(jnp.sum), big), _best_s(jax.jit(jnp.max), big), _best_s(product, row, big),
        _best_s(host.sum),
    ]
    copies = [_best_s(add, big), _best_s(lambda: np.copyto(target, host))]
    square = jnp.ones((2048, 2048), jnp.float32)
    return Floors(
        read_bytes_per_s=big.nbytes / min(reads), copy_bytes_per_s=2 * big.nbytes / min(copies),
        flops_per_s=2 * 2048**3 / _best_s(product, square, square),
        shapes_flops_per_s=_shape_rates(model, num_tokens, cells),
    )


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """[rows, width] on [others, width]: [rows, others]."""
    return jnp.einsum("ij,kj->ik", left, right, precision=jax.lax.Precision.HIGHEST)


def _shape_rates(model: ModelConfig, num_tokens: int, cells: int) -> dict[str, float]:
    """Rates of the MLP's and attention's products, for a question and for a long prefill."""
    rates = {}
    repeats = 16
    for tokens in (num_tokens, 512):
        x = jnp.ones((tokens, model.hidden_size), jnp.float32)
        weights = [
            jnp.ones((model.mlp_width, model.hidden_size), jnp.float32) for _ in range(repeats)
        ]
        chain = jax.jit(lambda x, weights: [_product(x, one) for one in weights])
        flops = 2 * repeats * tokens * model.hidden_size * model.mlp_width
        rates[f"mlp, {tokens} tokens"] = flops / _best_s(chain, x, weights)
        heads, rows = model.num_kv_heads, tokens * model.heads_per_kv_head
        q = jnp.ones((heads, rows, model.head_dim), jnp.float32)
        k = [jnp.ones((heads, cells, model.head_dim), jnp.float32) for _ in range(repeats)]
        attend = jax.jit(lambda q, k: [_scores_and_mix(q, one) for one in k])
        flops = 4 * repeats * heads * rows * model.head_dim * cells
        rates[f"attention, {tokens} tokens"] = flops / _best_s(attend, q, k)
    return rates


def _scores_and_mix(q: jax.Array, k: jax.Array) -> jax.Array:
    """The two products of attention without the softmax between them."""
    options: dict[str, Any] = {"precision": jax.lax.Precision.HIGHEST}
    scores = jnp.einsum("GQD,GKD->GQK", q, k, **options)
    return jnp.einsum("GQK,GKD->GQD", scores, k, **options)


def _best_s(function: Callable[..., Any], *args: Any, repeats: int = 7) -> float:
    """Return the least time of several calls, in seconds."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - began)
    return min(seconds)
