"""What the tests of the command line share: a tiny model on disk, and running it in process."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import jax
import model_files
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jaxstate import models
from jaxstate.serving import cli

_CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def write_tiny_gguf(
    path: pathlib.Path, *, max_positions: int = 64, chat_template: str | None = None
) -> pathlib.Path:
    """Write the tiny model with an own length of context; without a chat template if None."""
    config = dataclasses.replace(model_files.tiny_config(tied=True), max_positions=max_positions)
    metadata = model_files.without(model_files.gguf_metadata(config), "tokenizer.chat_template")
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    tensors = model_files.gguf_tensors(models.init_params(config, seed=2))
    return model_files.write_gguf(path, metadata, tensors)


@contextlib.contextmanager
def kept_jax_settings() -> Iterator[None]:
    """Undo what a command sets for the whole process."""
    before = {name: getattr(jax.config, name) for name in _CACHE_SETTINGS}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command left behind."""

    status: int
    out: str
    err: str


def run(capsys, *arguments: object) -> Result:
    """Run a command line in this process."""
    capsys.readouterr()
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Result(status=status, out=captured.out, err=captured.err)


class Dense:
    """A model's dense forward, compiled for few lengths."""

    def __init__(self, model: models.LoadedModel, step: int):
        """Pad sequences to multiples of `step` tokens."""
        self._model = model
        self._step = step
        self._forward = jax.jit(
            lambda params, ids: models.plain_forward.logits(params, model.config, ids)
        )

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after every token; padding is behind them and not seen."""
        padded = np.zeros(-(-len(ids) // self._step) * self._step, np.int32)
        padded[: len(ids)] = ids
        return np.asarray(self._forward(self._model.params, padded))[: len(ids)]

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """Return the natural log-probabilities after every token."""
        logits = self.logits(ids).astype(np.float64)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Continue a prompt, up to an end token."""
        ids: list[int] = list(prompt)
        while len(ids) < len(prompt) + count:
            ids.append(int(self.logits(ids)[-1].argmax()))
            if ids[-1] in self._model.tokenizer.eos_ids:
                break
        return ids[len(prompt) :]
