"""Saving and restoring a functional session with Orbax."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import orbax.checkpoint as ocp

from jaxstate.errors import SnapshotError
from jaxstate.functional import SessionConfig, SessionState, init_state

FORMAT = 1
_ARRAYS = "arrays"
_ABOUT = "about.json"


def save_state(path: str | pathlib.Path, state: SessionState, *, fingerprint: str) -> None:
    """Write a session to a new directory.

    Orbax saves arrays only, so what is static (sizes, model) lies in JSON beside them, written
    last: a directory without it is an unfinished snapshot.

    Args:
      fingerprint: identity of the weights, `LoadedModel.fingerprint`; `restore_state` checks it.
    Raises:
      SnapshotError: the directory exists already.
    """
    path = pathlib.Path(path).absolute()
    if path.exists():
        raise SnapshotError(f"snapshot {path} exists already; choose another path or remove it")
    path.mkdir(parents=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / _ARRAYS, state)
    about = {"format": FORMAT, "fingerprint": fingerprint, "config": _described(state.config)}
    (path / _ABOUT).write_text(json.dumps(about, indent=1))


def restore_state(
    path: str | pathlib.Path, config: SessionConfig, *, fingerprint: str
) -> SessionState:
    """Read a session back, bitwise.

    Raises:
      SnapshotError: no snapshot there, an unfinished or damaged one, or one of another format,
        model or session size.
    """
    path = pathlib.Path(path).absolute()
    try:
        about = json.loads((path / _ABOUT).read_text())
    except FileNotFoundError:
        raise SnapshotError(f"{path} holds no finished snapshot ({_ABOUT} is missing)") from None
    except json.JSONDecodeError as error:
        raise SnapshotError(f"snapshot {path}: {_ABOUT} is damaged ({error})") from error
    expected = {"format": FORMAT, "fingerprint": fingerprint, "config": _described(config)}
    for name, value in expected.items():
        if about.get(name) != value:
            raise SnapshotError(
                f"snapshot {path}: {name} expected {value}, got {about.get(name)}; restore it "
                "with the model and sizes it was saved with"
            )
    abstract = jax.eval_shape(lambda: init_state(config))
    device = jax.devices()[0]
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(device)
        ),
        abstract,
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path / _ARRAYS, abstract)
    except (ValueError, OSError, KeyError) as error:
        raise SnapshotError(f"snapshot {path} is damaged: {error}") from error


def _described(config: SessionConfig) -> dict:
    """Sizes as JSON; dtypes by name."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=lambda x: x.__name__))
