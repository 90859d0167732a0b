"""Functional sessions saved and restored by Orbax."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_engine

from jaxstate import functional, snapshot
from jaxstate.errors import SnapshotError
from jaxstate.functional import SessionConfig

CONFIG = SessionConfig(
    model=tiny_engine.MODEL, page_size=8, context_len=64, tail_len=24, evict_quantum=8,
    when_full="slide", chunk_tokens=16, stretch_cells=32,
)  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    params = tiny_engine.params()
    state = functional.start(params, CONFIG, [1, 2, 3])
    for _ in range(4):
        state = functional.append(params, state, list(range(23)))
    state, _ = functional.advance(params, state, [4, 5])
    path = tmp_path / "session"
    snapshot.save_state(path, state, fingerprint="weights-1")
    return path, state


def test_every_array_comes_back_bitwise_and_the_session_goes_on(saved):
    path, state = saved
    restored = snapshot.restore_state(path, CONFIG, fingerprint="weights-1")
    left, right = jax.tree.leaves(state), jax.tree.leaves(restored)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    params = tiny_engine.params()
    _, before = functional.query(params, state, [7, 8], max_new_tokens=4)
    _, after = functional.query(params, restored, [7, 8], max_new_tokens=4)
    np.testing.assert_array_equal(np.asarray(before.token_ids), np.asarray(after.token_ids))


def test_a_foreign_or_damaged_snapshot_is_refused(saved, tmp_path):
    path, state = saved
    with pytest.raises(SnapshotError, match="fingerprint expected weights-2, got weights-1"):
        snapshot.restore_state(path, CONFIG, fingerprint="weights-2")
    with pytest.raises(SnapshotError, match="config expected"):
        other = dataclasses.replace(CONFIG, page_size=16)
        snapshot.restore_state(path, other, fingerprint="weights-1")
    with pytest.raises(SnapshotError, match="no finished snapshot"):
        snapshot.restore_state(tmp_path / "nowhere", CONFIG, fingerprint="weights-1")
    with pytest.raises(SnapshotError, match="exists already"):
        snapshot.save_state(path, state, fingerprint="weights-1")
    about = path / "about.json"
    whole = about.read_text()
    about.write_text(whole[: len(whole) // 2])
    with pytest.raises(SnapshotError, match="damaged"):
        snapshot.restore_state(path, CONFIG, fingerprint="weights-1")
    about.write_text(json.dumps(json.loads(whole) | {"format": 99}))
    with pytest.raises(SnapshotError, match="format expected 1, got 99"):
        snapshot.restore_state(path, CONFIG, fingerprint="weights-1")
