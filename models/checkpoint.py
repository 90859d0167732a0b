"""Checkpoints of our own: weights as they lie in memory, restored by Orbax.

A checkpoint is a directory: the weights, uncompressed because that restores twice as fast, the
tokenizer, and jaxstate.json with everything else and the checksums of the other files.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tokenizers

from jaxstate.models import config_json, fields
from jaxstate.models.config import DtypePolicy, ModelConfig
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.models.params import Params, abstract_params
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.models.vocabulary import Vocabulary

FORMAT = 1
ABOUT = "jaxstate.json"
_WEIGHTS = "params"
_TOKENIZER = "tokenizer.json"
_BACKEND = "backend"  # the field of Vocabulary that tokenizer.json holds


def save_checkpoint(path: str | pathlib.Path, model: LoadedModel) -> None:
    """Write a model to a new directory, which `loading.load` reads.

    It is written beside its place, read back, compared and only then moved there, so that it
    appears whole or not at all. Reading back takes the memory of the weights once more.

    Raises:
      ValueError: the path exists already, or what was read back is not the model.
      OSError: it cannot be written.
    """
    path = pathlib.Path(path).absolute()
    if path.exists():
        raise ValueError(
            f"{path}: expected a path that does not exist yet, got one that does; choose another "
            "or remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        aside = pathlib.Path(scratch) / path.name
        aside.mkdir()
        _write(aside, model)
        _compare(aside, load_checkpoint(aside, dtypes=model.config.dtypes), model)
        os.rename(aside, path)


def load_checkpoint(path: str | pathlib.Path, *, dtypes: DtypePolicy) -> LoadedModel:
    """Read a model back, bitwise, onto the default device.

    Args:
      dtypes: those that it was saved with; casting is left to the loaders of other formats.
    Raises:
      ValueError: no checkpoint of ours, of another format or dtype, unfinished or damaged.
    """
    path = pathlib.Path(path).absolute()
    about = _about(path)
    config = read_config(path)
    if config.dtypes != dtypes:
        saved, wanted = (np.dtype(policy.param_dtype).name for policy in (config.dtypes, dtypes))
        raise ValueError(
            f"{path}: dtype: expected {saved}, which it was saved as, got {wanted}; load it as "
            f"{saved}, or save the model again as {wanted}"
        )
    _check_files(path, about)
    described = fields.Fields(about, str(path / ABOUT))
    return LoadedModel(
        config=config,
        params=_restore(path / _WEIGHTS, config),
        tokenizer=load_tokenizer(path),
        name=described.text("name"),
        fingerprint=described.text("fingerprint"),
    )


def read_config(path: pathlib.Path) -> ModelConfig:
    """Read the configuration alone; see load_checkpoint for errors."""
    return config_json.from_json(_about(path)["config"], ModelConfig, f"{path / ABOUT}: config")


def load_tokenizer(path: pathlib.Path) -> Tokenizer:
    """Read the tokenizer alone; see load_checkpoint for errors."""
    origin = f"{path / ABOUT}: tokenizer"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / _TOKENIZER))
    except Exception as error:  # the library raises bare Exception for every defect
        raise ValueError(
            f"{path / _TOKENIZER}: expected the tokenizer that was saved, got one that cannot be "
            f"read ({error}); the checkpoint is damaged, save the model again"
        ) from error
    about = _about(path)
    vocabulary = config_json.from_json(
        about["tokenizer"], Vocabulary, origin, **{_BACKEND: backend}
    )
    return Tokenizer(vocabulary)


def _about(path: pathlib.Path) -> dict[str, Any]:
    about = fields.read_json(path / ABOUT)
    if about.get("format") != FORMAT or not {"config", "tokenizer"} <= about.keys():
        raise ValueError(
            f"{path / ABOUT}: format: expected {FORMAT}, got {about.get('format')!r}; save the "
            "model again with this version"
        )
    return about


def _write(directory: pathlib.Path, model: LoadedModel) -> None:
    with _checkpointer() as checkpointer:
        checkpointer.save(directory / _WEIGHTS, args=ocp.args.PyTreeSave(model.params))
    # It only names the folder that was written aside, which is no longer there.
    (directory / _WEIGHTS / "commit_success.txt").unlink(missing_ok=True)
    vocabulary = model.tokenizer.vocabulary
    vocabulary.backend.save(str(directory / _TOKENIZER))
    about: dict[str, Any] = {
        "format": FORMAT,
        "name": model.name,
        "fingerprint": model.fingerprint,
        "config": config_json.to_json(model.config),
        "tokenizer": config_json.to_json(vocabulary, leave_out=_BACKEND),
    }
    about["sha256"] = _checksums(directory, about)
    (directory / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")


def _restore(path: pathlib.Path, config: ModelConfig) -> Params:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_params(config),
    )
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    with _checkpointer() as checkpointer:
        return checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args)
        )


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _checksums(directory: pathlib.Path, about: dict[str, Any]) -> dict[str, str]:
    """Return the sha256 of every file by its path, of ABOUT that of its other contents."""
    described = {key: value for key, value in about.items() if key != "sha256"}
    text = json.dumps(described, sort_keys=True)
    found = {ABOUT: hashlib.sha256(text.encode()).hexdigest()}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != ABOUT:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _check_files(directory: pathlib.Path, about: dict[str, Any]) -> None:
    found = _checksums(directory, about)
    expected = about.get("sha256")
    if found != expected:
        wanted = expected if isinstance(expected, dict) else {}
        names = found.keys() | wanted.keys()
        wrong = min(name for name in names if found.get(name) != wanted.get(name))
        raise ValueError(
            f"{directory}: expected the files that were saved, got a difference in {wrong}; the "
            "checkpoint is incomplete or damaged, save the model again"
        )


def _compare(path: pathlib.Path, read: LoadedModel, model: LoadedModel) -> None:
    """Check that what was read back is what was to be saved."""
    same = read.config == model.config
    for left, right in zip(
        jax.tree.leaves(read.params), jax.tree.leaves(model.params), strict=True
    ):
        same = same and left.dtype == right.dtype and bool((left == right).all())
    if not same:
        raise ValueError(
            f"{path.name}: expected to read back what was written, got another model; check the "
            "disk"
        )
