"""`jaxstate ask`: one prompt, one answer, and everything a reader may want to check about it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console

from jaxstate.answer import Answer, Token
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, InputError
from jaxstate.models.config import ModelConfig
from jaxstate.models.quantized import Weights
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.sampling import Sampling
from jaxstate.serving import local_model, terminal
from jaxstate.session import PaidTail
from jaxstate.state import StepShape

NUM_TOP_LOGITS = 5

_PAGE_SIZE = 64
_STEP_TOKENS = (1, 32, 64, 128, 256, 512)
_LEAST_CELLS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What `ask` was told on the command line.

    Attributes:
      model: name or path.
      prompt: text.
      raw: the prompt is the whole text; else it is put as a user's message in the model's own
        chat template, if it has one.
      max_new_tokens: longest answer, in tokens.
      sampling: how tokens are drawn.
      stop: strings that end the answer.
      dtype: "float32" or "bfloat16".
      weights: what matrices are kept as, see models.quantized.
    """

    model: str
    prompt: str
    raw: bool
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    dtype: str
    weights: Weights = "float"

    def __post_init__(self):
        """Refuse what would only fail after the model is loaded and compiled."""
        if self.max_new_tokens < 1:
            raise InputError(f"max-new-tokens: expected at least 1, got {self.max_new_tokens}")
        if "" in self.stop:
            raise InputError("stop: expected some text, got none; leave the option out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Where the time went, by the names under which it is printed."""

    load_s: float
    compile_s: float
    first_token_ms: float
    total_ms: float


def run(
    question: Question, *, as_json: bool, cache_dir: pathlib.Path, out: Console, log: Console
) -> None:
    """Answer on `out`: streamed text, or one JSON object at the end.

    Raises:
      ValueError, JaxStateError, RuntimeError: the message says what is wrong.
    """
    model = local_model.load(
        question.model, dtype=question.dtype, weights=question.weights, cache_dir=cache_dir,
        console=log,
    )
    tokenizer = model.loaded.tokenizer
    prompt_ids = encode_prompt(question, tokenizer)
    config = engine_config(model.loaded.config, len(prompt_ids), question.max_new_tokens)
    with terminal.CompileProgress(log) as compiling:
        engine = Engine(
            model.loaded.params, model.loaded.config, config, tokenizer=tokenizer,
            progress=compiling,
        )
        compile_s = compiling.seconds

    began = time.perf_counter()
    session = engine.create()
    # Forwarding the prompt ahead of the question leaves its logits to look at; the question then
    # begins with everything paid for.
    paid = engine.advance(session, prompt_ids)
    stream = engine.stream(
        session, prompt_ids, max_new_tokens=question.max_new_tokens, sampling=question.sampling,
        eos_ids=tokenizer.eos_ids, stop=question.stop,
    )
    parts = Parts(stream)
    first_token_ms = None
    for token in parts:
        if first_token_ms is None:
            first_token_ms = (time.perf_counter() - began) * 1e3
        if not as_json:
            out.file.write(token.text)
            out.file.flush()
    assert first_token_ms is not None
    timings = Timings(
        load_s=round(model.load_s, 3), compile_s=round(compile_s, 3),
        first_token_ms=round(first_token_ms, 3),
        total_ms=round((time.perf_counter() - began) * 1e3, 3),
    )
    if as_json:
        found = report(model.loaded.name, prompt_ids, parts.answer, paid, tokenizer, timings)
        out.file.write(json.dumps(found, ensure_ascii=False) + "\n")
    else:
        out.file.write("\n")
    out.file.flush()
    terminal.say(log, summary(len(prompt_ids), parts.answer, timings))


def encode_prompt(question: Question, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt's token ids, raw or in the model's chat template.

    Raises:
      ValueError: the prompt is empty, or the template refuses it.
    """
    if question.raw:
        ids = tokenizer.encode(question.prompt, add_bos=tokenizer.add_bos)
    else:
        ids = tokenizer.encode_chat([{"role": "user", "content": question.prompt}]).ids
    if not ids:
        raise ValueError("prompt: expected some text, got none that the tokenizer keeps")
    return ids


def engine_config(model: ModelConfig, prompt_len: int, max_new_tokens: int) -> EngineConfig:
    """Size an engine for one prompt, in few sizes so that compiled programs are used again.

    Raises:
      CapacityError: prompt and answer are longer than the model's longest context.
    """
    if prompt_len + max_new_tokens > model.max_positions:
        raise CapacityError(
            f"{prompt_len} prompt tokens and {max_new_tokens} new ones exceed the model's "
            f"{model.max_positions} positions; shorten the prompt or lower --max-new-tokens"
        )
    cells = _LEAST_CELLS
    while cells < prompt_len + max_new_tokens + 2 * _PAGE_SIZE:
        cells *= 2
    longest = _STEP_TOKENS[-1]
    rest = prompt_len % longest if prompt_len > longest else prompt_len
    sizes = {1, next(tokens for tokens in _STEP_TOKENS if tokens >= rest)}
    if prompt_len > longest:
        sizes.add(longest)
    shapes = tuple(
        StepShape(num_tokens=tokens, block_tokens=tokens, num_rows=1) for tokens in sorted(sizes)
    )
    return EngineConfig(
        num_pages=cells // _PAGE_SIZE, page_size=_PAGE_SIZE,
        context_len=max(min(cells, model.max_positions) - 1, 1), evict_quantum=_PAGE_SIZE,
        step_shapes=shapes,
    )


class Parts:
    """Iterates over a stream's tokens and keeps the answer that it returns at the end."""

    answer: Answer

    def __init__(self, stream):
        """Wrap what Engine.stream returned."""
        self._stream = stream

    def __iter__(self) -> Iterator[Token]:
        """Yield tokens as they are drawn."""
        self.answer = yield from self._stream


def report(
    model_name: str, prompt_ids: list[int], answer: Answer, paid: PaidTail, tokenizer: Tokenizer,
    timings: Timings,
) -> dict:
    """Return what --json prints."""
    logits = np.asarray(paid.ready.row_logits())  # [vocab] f32
    top = np.argsort(-logits, kind="stable")[:NUM_TOP_LOGITS].tolist()
    return {
        "model": model_name,
        "prompt_ids": prompt_ids,
        "ids": list(answer.token_ids),
        "text": answer.text,
        "finish_reason": answer.finish_reason.value,
        "top_logits": [
            {
                "id": token_id, "token": tokenizer.decode([token_id]),
                "logit": float(logits[token_id]),
                "logprob": float(logits[token_id]) - paid.ready.lse,
            }
            for token_id in top
        ],
        "timings": dataclasses.asdict(timings),
    }


def summary(prompt_len: int, answer: Answer, timings: Timings) -> str:
    """Return one line about an answer."""
    count = len(answer.token_ids)
    rate = ""
    if count > 1:
        per_token = (timings.total_ms - timings.first_token_ms) / (count - 1)
        rate = f", then {per_token:.0f} ms a token"
    return (
        f"{prompt_len} prompt tokens, first token after {timings.first_token_ms:.0f} ms{rate}; "
        f"{count} tokens, ended by {answer.finish_reason.value}"
    )
