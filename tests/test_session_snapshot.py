"""Sessions of an engine saved and restored: bit by bit the same, or refused and nothing harmed."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import random
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine

from jaxstate import models, session_snapshot
from jaxstate.engine import Engine
from jaxstate.errors import (
    ForeignSnapshotError,
    PoolFullError,
    SessionError,
    SnapshotError,
    SnapshotExistsError,
)
from jaxstate.kernels_pallas.block_selector import BlockSelector

WEIGHTS = "weights-1"


@functools.cache
def _compiled(page_size=8):
    num_pages = 480 // page_size
    return tiny_engine.build(num_pages=num_pages, page_size=page_size)


@pytest.fixture
def engine():
    with tiny_engine.left_empty(_compiled()) as engine:
        yield engine


def _ids(seed, count):
    return tiny_engine.random_ids(seed, count)


def _slid(engine, turns=7):
    session = engine.create(_ids(1, 5), when_full="slide", tenant="t")
    for seed in range(turns):
        engine.append(session, _ids(seed, 19))
    engine.rollback(session, 3)
    assert engine.session(session).evicted
    return session


def _seen(engine, session):
    """The bits of the cells that a session sees, and the position and shift of each."""
    entries = engine.session(session).entries
    size = engine.config.page_size
    cells = [e.page * size + cell for e in entries for cell in range(e.first, e.fill)]
    arrays = engine.executor.read_cells(np.asarray(cells, np.int64))
    places = [(e.base + c, e.shift) for e in entries for c in range(e.first, e.fill)]
    return places, [part.tobytes() for layer in arrays for part in layer]


def _save(engine, session, path):
    record = engine.session(session)
    snapshot = session_snapshot.take(engine.verbs, record, fingerprint=WEIGHTS)
    session_snapshot.write(path, snapshot)


def _restore(engine, path, name, fingerprint=WEIGHTS):
    snapshot = session_snapshot.read(path, engine.verbs, fingerprint=fingerprint)
    return session_snapshot.put(engine.verbs, snapshot, name)


def _question(engine, session, seed=3):
    return engine.query(session, _ids(seed, 3), max_new_tokens=3).token_ids


@pytest.mark.parametrize("page_size", [8, 16])
def test_a_slid_session_comes_back_bit_by_bit_on_pages_of_any_size(engine, tmp_path, page_size):
    session = _slid(engine)
    _save(engine, session, tmp_path / "one")
    kept = dataclasses.replace(engine.session(session))
    with tiny_engine.left_empty(_compiled(page_size)) as other:
        other.append(other.create(), _ids(30, 40))  # others write where it was
        found = _restore(other, tmp_path / "one", "copy")
        assert _seen(other, "copy") == _seen(engine, session)
        for name in ("token_ids", "version", "evicted", "stream_floor", "tenant", "when_full"):
            assert getattr(found, name) == getattr(kept, name)
        assert _question(other, "copy") == _question(engine, session)
        for seed in (40, 41):  # both go on sliding alike
            both = [(engine, session), (other, "copy")]
            versions = {one.append(name, _ids(seed, 17)) for one, name in both}
            assert len(versions) == 1
            assert _question(other, "copy", seed) == _question(engine, session, seed)


def test_bfloat16_cells_come_back_bit_by_bit_and_not_into_float32(engine, tmp_path):
    half = dataclasses.replace(
        tiny_engine.MODEL, dtypes=dataclasses.replace(
            tiny_engine.MODEL.dtypes, param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16,
            cache_dtype=jnp.bfloat16,
        ),
    )  # fmt: skip
    config = tiny_engine.engine_config(step_shapes=tiny_engine.SHAPES[2:])
    other = Engine(models.init_params(half, seed=0), half, config)
    session = _slid(other)
    _save(other, session, tmp_path / "one")
    _restore(other, tmp_path / "one", "copy")
    assert _seen(other, "copy") == _seen(other, session)
    with pytest.raises(ForeignSnapshotError, match="cells expected .*float32.* got .*bfloat16"):
        _restore(engine, tmp_path / "one", "copy")


def test_bounds_of_blocks_are_there_for_a_selector(tmp_path):
    engine = tiny_engine.build(
        page_size=32, num_pages=12, step_shapes=tiny_engine.SHAPES[2:],
        selector=BlockSelector(kept=0.5, sink_tokens=16, recent_tokens=16, dense_layers=0),
    )  # fmt: skip
    session = engine.create(_ids(1, 90))
    _save(engine, session, tmp_path / "one")
    _restore(engine, tmp_path / "one", "copy")
    found = [
        [part[leaf] for part in engine.executor.read_pages([entry.page for entry in one.entries])]
        for one in (engine.session(session), engine.session("copy"))
        for leaf in (2, 3, 6, 7)
    ]
    for before, after in zip(found[:4], found[4:], strict=True):
        np.testing.assert_array_equal(before, after)
    assert _question(engine, "copy") == _question(engine, session)


def test_a_live_session_gives_way_to_its_snapshot_and_its_version_goes_on(engine, tmp_path):
    session = _slid(engine)
    _save(engine, session, tmp_path / "one")
    before = _seen(engine, session)
    version = engine.session(session).version
    engine.append(session, _ids(50, 9))
    _restore(engine, tmp_path / "one", session)
    assert _seen(engine, session) == before
    assert engine.session(session).version == version + 2


def test_of_two_that_are_written_under_one_name_the_first_stays(engine, tmp_path, monkeypatch):
    first, second = _slid(engine), engine.create(_ids(2, 9))
    sync = session_snapshot._sync

    def save_first(directory):
        monkeypatch.undo()
        _save(engine, first, tmp_path / "saved")
        sync(directory)

    monkeypatch.setattr(session_snapshot, "_sync", save_first)
    with pytest.raises(SnapshotExistsError, match="saved exists already"):
        _save(engine, second, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    _restore(engine, tmp_path / "saved", "copy")
    assert engine.session("copy").token_ids == engine.session(first).token_ids


def _damage(path, rng):
    files = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return file


def test_a_flipped_bit_is_refused_and_the_live_session_goes_on(engine, tmp_path):
    session = _slid(engine)
    rng = random.Random(1)
    before = tiny_engine.state_of(engine)
    for turn in range(12):
        path = tmp_path / str(turn)
        _save(engine, session, path)
        _damage(path, rng)
        with pytest.raises(SnapshotError, match="damaged|no finished"):
            _restore(engine, path, rng.choice([session, "copy"]))
    assert tiny_engine.state_of(engine) == before


def test_what_is_not_a_snapshot_of_this_model_is_refused(engine, tmp_path):
    session = _slid(engine)
    path = tmp_path / "one"
    _save(engine, session, path)
    with pytest.raises(ForeignSnapshotError, match="fingerprint expected weights-2, got weights-1"):
        _restore(engine, path, "copy", fingerprint="weights-2")
    with pytest.raises(SnapshotError, match="exists already"):
        _save(engine, session, path)
    with pytest.raises(SnapshotError, match="no finished snapshot"):
        _restore(engine, tmp_path / "none", "copy")
    about = json.loads((path / "about.json").read_text())
    about["session"]["version"] += 1
    (path / "about.json").write_text(json.dumps(about))
    with pytest.raises(SnapshotError, match="about.json is damaged"):
        _restore(engine, path, "copy")
    assert [file.name for file in tmp_path.iterdir()] == ["one"]  # nothing is left aside


def test_without_room_a_restore_changes_nothing(engine, tmp_path):
    session = _slid(engine)
    _save(engine, session, tmp_path / "one")
    names = [engine.create(_ids(seed, 88)) for seed in range(4)]
    before = tiny_engine.state_of(engine)
    with pytest.raises(PoolFullError):
        _restore(engine, tmp_path / "one", "copy")
    assert tiny_engine.state_of(engine) == before
    assert len(names) == 4


def test_a_session_that_is_out_of_the_pool_is_not_saved(engine, tmp_path):
    session = engine.create(_ids(1, 30))
    engine.verbs.tiers.lose(engine.session(session))
    with pytest.raises(SessionError, match="not in the pool"):
        _save(engine, session, tmp_path / "one")


def test_a_disk_without_room_is_said_so_and_leaves_nothing_behind(tmp_path):
    script = pathlib.Path(__file__).with_name("full_disk.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=True
    )
    refused, left, version = done.stdout.splitlines()
    assert refused == (
        "RESOURCE_EXHAUSTED snapshot one cannot be written: File too large; free space or repair "
        "the disk"
    )
    assert (left, version) == ("[]", "0")
