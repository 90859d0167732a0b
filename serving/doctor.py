"""`jaxstate doctor`: whether a model fits, is whole, and computes what it should."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
from rich.console import Console

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models import loading, params, plain_forward
from jaxstate.models.config import DtypePolicy, ModelConfig
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.serving import local_model, machine, terminal
from jaxstate.state import StepShape

Verdict = Literal["ok", "warning", "failed"]

_MARKS = {"ok": "✓", "warning": "!", "failed": "✗"}
_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  indented\n\tcode() { return 42; }\n\n",
    "Größe, naïve, Ελληνικά, Русский, עברית, العربية, हिन्दी, 中文, 日本語, 한국어 👩🏽‍🚀",
)
_PLAIN_TOKENS = 48
_STEPS = (16, 48)
_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}  # absolute; times the largest logit in bf16
_RECORDED_TOLERANCE = 1e-2
_CONTEXT = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at.

    Attributes:
      check: its name.
      verdict: "warning" = it works, but not as one may think.
      text: what was found, and what to do if it is not well.
    """

    check: str
    verdict: Verdict
    text: str


def run(
    model: str, *, dtype: str, context: int | None, as_json: bool, cache_dir: pathlib.Path,
    out: Console, log: Console,
) -> bool:
    """Print a line per finding; returns whether none failed.

    Args:
      context: tokens whose keys and values must fit; at most the model's positions.
    Raises:
      ValueError: unknown model.
    """
    path = local_model.path_of(model, cache_dir, log)
    findings = examine(path, name=model, dtype=dtype, context=context, log=log)
    return report(findings, as_json=as_json, out=out)


def report(findings: Iterable[Finding], *, as_json: bool, out: Console) -> bool:
    """Print a line per finding; returns whether none failed."""
    sound = True
    for finding in findings:
        sound &= finding.verdict != "failed"
        if as_json:
            out.file.write(json.dumps(dataclasses.asdict(finding), ensure_ascii=False) + "\n")
            out.file.flush()
        else:
            mark = _MARKS[finding.verdict]
            terminal.say(out, f"{mark} {finding.check:<14} {finding.text}")
    return sound


def examine(
    path: pathlib.Path, *, name: str, dtype: str, context: int | None, log: Console
) -> Iterator[Finding]:
    """Look at one thing after another; stops where the next could only fail for the same reason."""
    config, finding = _tried("architecture", lambda: _architecture(path, dtype))
    yield finding
    if config is None:
        return
    finding = memory(config, context)
    yield finding
    if finding.verdict == "failed":
        return
    with terminal.activity(log, f"loading {path.name}"):
        loaded, finding = _tried("weights", lambda: _weights(path, dtype))
    yield finding
    if loaded is None:
        return
    yield tokenizer_round_trip(loaded.tokenizer)
    yield template(loaded.tokenizer)
    with terminal.activity(log, "computing the same in two ways"):
        yield parity_with_plain_forward(loaded, dtype)
    if dtype == "float32":
        with terminal.activity(log, "comparing with recorded answers"):
            yield from parity_with_record(loaded, name)


def _tried(check: str, function: Callable[[], tuple[Any, str]]) -> tuple[Any, Finding]:
    """Return a check's value and finding; None and what was wrong if it raised."""
    try:
        value, text = function()
    except (ValueError, OSError) as error:
        return None, Finding(check=check, verdict="failed", text=" ".join(str(error).split()))
    return value, Finding(check=check, verdict="ok", text=text)


def _architecture(path: pathlib.Path, dtype: str) -> tuple[ModelConfig, str]:
    config = loading.read_config(path, DtypePolicy.named(dtype))
    windows = sum(layer.window is not None for layer in config.layers)
    text = (
        f"{config.family}: {config.num_layers} layers"
        + (f" ({windows} with a sliding window)" if windows else "")
        + f", {config.num_heads} heads on {config.num_kv_heads}, vocabulary of "
        f"{config.vocab_size}, up to {config.max_positions} positions"
    )
    return config, text


def memory(config: ModelConfig, context: int | None) -> Finding:
    """Compare weights and the keys and values of a context with what is free."""
    tokens = min(context or _CONTEXT, config.max_positions)
    weights, cells = machine.weights_bytes(config), tokens * config.bytes_per_cell
    free = machine.free_bytes()
    text = (
        f"weights {weights / 1e6:,.0f} MB, keys and values of {tokens:,} tokens "
        f"{cells / 1e6:,.0f} MB"
    )
    if free is None:
        return Finding(check="memory", verdict="warning", text=f"{text}; what is free is unknown")
    text += f"; {free / 1e6:,.0f} MB are free"
    if weights + cells > free:
        remedy = "take bfloat16, a shorter --context or a smaller model"
        return Finding(check="memory", verdict="failed", text=f"{text}: {remedy}")
    return Finding(check="memory", verdict="ok", text=text)


def _weights(path: pathlib.Path, dtype: str) -> tuple[loading.LoadedModel, str]:
    loaded = loading.load(path, dtype=dtype)
    count = params.num_params(loaded.config)
    return loaded, (
        f"{count / 1e6:,.1f} million, all tensors there, of the right shape and finite; "
        f"fingerprint {loaded.fingerprint[:12]}…"
    )


def tokenizer_round_trip(tokenizer: Tokenizer) -> Finding:
    """Encode texts of many scripts and decode them again."""
    changed = [
        text for text in _TEXTS if tokenizer.decode(tokenizer.encode(text)).strip() != text.strip()
    ]
    counts = f"{tokenizer.vocab_size} tokens, ends with {list(tokenizer.eos_ids)}"
    if changed:
        text = f"{counts}; this text does not come back as it was: {changed[0]!r}"
        return Finding(check="tokenizer", verdict="warning", text=text)
    return Finding(check="tokenizer", verdict="ok", text=f"{counts}; texts come back as they were")


def template(tokenizer: Tokenizer) -> Finding:
    """Render a conversation and see that the text begins with the start token once at most."""
    if tokenizer.chat_template is None:
        text = "none, as base models are: messages go to it as raw text"
        return Finding(check="chat template", verdict="warning", text=text)
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "How are you?"},
    ]
    try:
        chat = tokenizer.encode_chat(messages)
    except ValueError as error:
        return Finding(check="chat template", verdict="failed", text=str(error))
    starts = 0 if tokenizer.bos_id is None else chat.ids[:2].count(tokenizer.bos_id)
    if starts > 1:
        text = "the text begins with the start token twice; give the model another template"
        return Finding(check="chat template", verdict="failed", text=text)
    text = f"three messages make {len(chat.ids)} tokens; `jaxstate render` shows them"
    return Finding(check="chat template", verdict="ok", text=text)


def parity_with_plain_forward(loaded: loading.LoadedModel, dtype: str) -> Finding:
    """Compare paged steps with one dense pass over the same tokens."""
    count = min(_PLAIN_TOKENS, loaded.config.max_positions - 1)
    ids = np.random.default_rng(0).integers(0, loaded.config.vocab_size, count)
    engine = _engine(loaded)
    session = engine.create()
    engine.append(session, ids[:-5].tolist())
    found = np.asarray(engine.advance(session, ids[-5:].tolist()).ready.row_logits(), np.float32)
    plain = plain_forward.logits(loaded.params, loaded.config, ids.astype(np.int32))
    expected = np.asarray(plain[-1], np.float32)
    largest = float(np.abs(expected).max())
    limit = _TOLERANCE[dtype] * (1.0 if dtype == "float32" else largest)
    off = float(np.abs(found - expected).max())
    text = (
        f"logits of paged steps differ by {off:.1e} from those of one dense pass "
        f"(limit {limit:.0e}, largest logit {largest:.0f})"
    )
    return Finding(check="parity", verdict="ok" if off <= limit else "failed", text=text)


def parity_with_record(loaded: loading.LoadedModel, name: str) -> Iterator[Finding]:
    """Compare greedy answers with those Hugging Face's transformers gave, if they are known."""
    folder = importlib.resources.files("jaxstate.serving") / "data" / "parity"
    record = folder / f"{name}.json"
    if not record.is_file():
        return
    engine = _engine(loaded)
    equal, off = 0, 0.0
    cases = json.loads(record.read_text(encoding="utf-8"))
    for case in cases:
        answer = engine.generate(case["ids"], max_new_tokens=len(case["new"]))
        equal += list(answer.token_ids) == case["new"]
        session = engine.create()
        logits = np.asarray(engine.advance(session, case["ids"]).ready.row_logits())
        engine.close(session)
        off = max(off, *(abs(float(logits[token]) - logit) for token, logit in case["top5"]))
    sound = equal == len(cases) and off <= _RECORDED_TOLERANCE
    text = (
        f"{equal} of {len(cases)} recorded answers of transformers are equal, their first logits "
        f"within {off:.1e}"
    )
    yield Finding(check="parity", verdict="ok" if sound else "failed", text=text)


def _engine(loaded: loading.LoadedModel) -> Engine:
    shapes = tuple(StepShape(num_tokens=n, block_tokens=n, num_rows=1) for n in (1, *_STEPS))
    config = EngineConfig(
        num_pages=8, page_size=32, context_len=min(128, loaded.config.max_positions - 1),
        evict_quantum=32, step_shapes=shapes,
    )
    return Engine(loaded.params, loaded.config, config, tokenizer=loaded.tokenizer)
