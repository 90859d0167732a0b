"""Load everything a model consists of from one path or name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable

from jax.sharding import Mesh

from jaxstate.models import checkpoint, config_json, gguf_loader, safetensors_loader, sources
from jaxstate.models.config import DtypePolicy, ModelConfig
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.models.quantized import Weights
from jaxstate.models.sharding import Sharding, place
from jaxstate.models.tokenizer import Tokenizer


def load(
    model: str | pathlib.Path,
    *,
    dtype: str = "float32",
    weights: Weights = "float",
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Load a model with its tokenizer.

    Args:
      model: a GGUF file, a Hugging Face directory, a checkpoint of `save_checkpoint`, or a name
        that `sources.resolve` knows, such as an id of the Hugging Face hub.
      dtype: name of a DtypePolicy, "float32" or "bfloat16".
      weights: what matrices are kept as, see quantized.Weights; a checkpoint's stay what they are.
      mesh: devices that float weights are spread over as they are read, see Sharding; give the
        engine `Sharding.of(config, mesh)`. None = the default device.
    Raises:
      ValueError: nothing is there, or the model cannot be used; the message says why.
      RuntimeError: see sources.resolve.
    """
    dtypes = DtypePolicy.named(dtype)
    path = sources.resolve(model)
    try:
        if (path / checkpoint.ABOUT).is_file():
            if weights != "float":
                raise ValueError(
                    f'{path}: weights: expected "float" for a checkpoint, whose weights stay as '
                    f"they were saved, got {weights!r}; load the model that it was made of"
                )
            loaded = checkpoint.load_checkpoint(path, dtypes=dtypes)
            if mesh is None:
                return loaded
            placed = place(loaded.params, loaded.config, Sharding.of(loaded.config, mesh))
            return dataclasses.replace(loaded, params=placed)
        return _load_files(path, dtypes, weights, mesh)
    except OSError as error:
        raise ValueError(
            f"{error.filename or path}: expected a file that can be read, got "
            f"{error.strerror or error}; check the path and its permissions"
        ) from error


def _load_files(
    path: pathlib.Path, dtypes: DtypePolicy, weights: Weights, mesh: Mesh | None
) -> LoadedModel:
    if mesh is not None and weights != "float":
        raise ValueError(
            f'{path}: weights: expected "float" on several devices, got {weights!r}; quantized '
            "weights stay on one"
        )
    if path.is_dir():
        config, params = safetensors_loader.load_safetensors(
            path, dtypes=dtypes, mesh=mesh, weights=weights
        )
        tokenizer = Tokenizer.from_hf_dir(path)
        files = safetensors_loader.weight_files(path)
    else:
        file = GgufFile(path)
        config, params = gguf_loader.load_gguf(file, dtypes=dtypes, weights=weights, mesh=mesh)
        tokenizer = Tokenizer.from_gguf(file)
        files = file.paths
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: expected a tokenizer of at most {config.vocab_size} ids, got "
            f"{tokenizer.vocab_size}; weights and tokenizer do not belong together"
        )
    return LoadedModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        name=_name(path),
        fingerprint=fingerprint(config, files, weights),
    )


def _name(path: pathlib.Path) -> str:
    """Return the name of a file without its suffix, or of a directory.

    The hub's cache calls a model's directory models--<organization>--<name>/snapshots/<revision>.
    """
    if path.parent.name == "snapshots":
        return path.parents[1].name.rpartition("--")[2]
    return path.name if path.is_dir() else path.stem


def fingerprint(
    config: ModelConfig, files: Iterable[pathlib.Path], weights: Weights = "float"
) -> str:
    """Return the sha256 of a configuration, dtypes included, and of all bytes of the weight files.

    Names and places of the files do not matter, their order does, and so does what matrices were
    made into: stored and quantized ones may be of one form.
    """
    described = json.dumps([weights, config_json.to_json(config)], sort_keys=True)
    digest = hashlib.sha256(described.encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_config(path: pathlib.Path, dtypes: DtypePolicy) -> ModelConfig:
    """Read a configuration without the weights; errors as for `load`.

    A checkpoint has the dtypes that it was saved with.
    """
    if (path / checkpoint.ABOUT).is_file():
        return checkpoint.read_config(path)
    if path.is_dir():
        return safetensors_loader.read_config(path, dtypes)
    return gguf_loader.read_config(GgufFile(path), dtypes)


def load_tokenizer(path: pathlib.Path) -> Tokenizer:
    """Read a tokenizer without the weights; errors as for `load`."""
    if (path / checkpoint.ABOUT).is_file():
        return checkpoint.load_tokenizer(path)
    return Tokenizer.from_hf_dir(path) if path.is_dir() else Tokenizer.from_gguf(path)
