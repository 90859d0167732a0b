"""Load everything a model consists of from one path."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable

import jax.numpy as jnp

from jaxstate.models import gguf_loader, safetensors_loader
from jaxstate.models.config import DtypePolicy, ModelConfig
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.params import Params
from jaxstate.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to run.

    Attributes:
      config: sizes and dtypes.
      params: the tree of param_specs(config).
      tokenizer: text to ids and back.
      name: name of the file without its suffix, or of the directory.
      fingerprint: see `fingerprint`; equal means interchangeable, also for saved keys and values.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    name: str
    fingerprint: str


def load(path: str | pathlib.Path, *, dtype: str = "float32") -> LoadedModel:
    """Load a GGUF file or a Hugging Face directory with its tokenizer.

    Args:
      path: the file or directory; `sources.resolve` turns a name into one.
      dtype: name of a DtypePolicy, "float32" or "bfloat16".
    Raises:
      ValueError: nothing is there, or the model cannot be used; the message says why.
    """
    path = pathlib.Path(path)
    dtypes = DtypePolicy.named(dtype)
    if path.is_dir():
        config, params = safetensors_loader.load_safetensors(path, dtypes=dtypes)
        tokenizer = Tokenizer.from_hf_dir(path)
        files = safetensors_loader.weight_files(path)
    elif path.is_file():
        file = GgufFile(path)
        config, params = gguf_loader.load_gguf(file, dtypes=dtypes)
        tokenizer = Tokenizer.from_gguf(file)
        files = (path,)
    else:
        raise ValueError(
            f"{path}: expected a GGUF file or a Hugging Face directory, got nothing there; pull "
            "the model first or correct the path"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: expected a tokenizer of at most {config.vocab_size} ids, got "
            f"{tokenizer.vocab_size}; weights and tokenizer do not belong together"
        )
    return LoadedModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        name=path.name if path.is_dir() else path.stem,
        fingerprint=fingerprint(config, files),
    )


def fingerprint(config: ModelConfig, files: Iterable[pathlib.Path]) -> str:
    """Return the sha256 of a configuration, dtypes included, and of all bytes of the weight files.

    Names and places of the files do not matter, their order does.
    """
    digest = hashlib.sha256(_canonical(config).encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _canonical(config: ModelConfig) -> str:
    values = dataclasses.asdict(config)
    values["dtypes"] = {key: jnp.dtype(dtype).name for key, dtype in values["dtypes"].items()}
    return json.dumps(values, sort_keys=True)
