"""Sessions saved by name over gRPC: they come back as they were, or it is said why not."""

from __future__ import annotations

import base64
import os
import shutil
import threading

import grpc
import grpc_service
import pytest
import tiny_engine
from grpc_service import refused, tokens

from jaxstate import session_snapshot
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import snapshot_store
from jaxstate.serving.quotas import Quota
from jaxstate.serving.snapshot_store import SnapshotStore

WAIT_S = 60
StatusCode = grpc.StatusCode


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    model = grpc_service.load(tmp_path_factory.mktemp("model"))
    return model, grpc_service.engine_of(model)


@pytest.fixture
def running(behind, tmp_path):
    model, engine = behind
    store = SnapshotStore(tmp_path / "saved", fingerprint=model.fingerprint)
    with grpc_service.serving(engine, model.tokenizer, snapshots=store) as running:
        yield running


@pytest.fixture
def stub(running):
    return running.stub


@pytest.fixture
def saved(tmp_path):
    return tmp_path / "saved" / "tenant-"


def _ids(count, seed=0):
    return tiny_engine.random_ids(seed, count)


def _session(stub, name="s"):
    request = pb.CreateSessionRequest(session_id=name, prefix=tokens(_ids(9)))
    stub.CreateSession(request, timeout=WAIT_S)
    stub.Append(pb.AppendRequest(session_id=name, prompt=tokens(_ids(11, 1))), timeout=WAIT_S)


def _question():
    return pb.Question(prompt=tokens(_ids(3, 2)), max_new_tokens=4)


def _answer(stub, name):
    request = pb.QueryRequest(session_id=name, question=_question())
    return list(stub.Query(request, timeout=WAIT_S))[-1].answer


def _save(stub, name="", session="s"):
    return stub.Snapshot(pb.SnapshotRequest(session_id=session, name=name), timeout=WAIT_S)


def _restore(stub, name, session=""):
    return stub.Restore(pb.RestoreRequest(name=name, session_id=session), timeout=WAIT_S)


def _bytes_per_cell(stub):
    return stub.GetModelInfo(pb.GetModelInfoRequest()).bytes_per_cell


def _get(stub, name):
    return stub.GetSession(pb.GetSessionRequest(session_id=name), timeout=WAIT_S)


def test_a_saved_session_comes_back_under_any_id_with_its_questions(stub):
    _session(stub)
    registered = stub.Register(pb.RegisterRequest(session_id="s", question=_question(), risk=0.05))
    before = _answer(stub, "s")
    found = _save(stub, "monday")
    assert (found.name, found.session_id, found.version) == ("monday", "s", 1)
    assert found.context_tokens == 20 and found.size_bytes > 0 and found.saved_at > 1.7e9
    copy = _restore(stub, "monday", "copy")
    assert (copy.session_id, copy.version, copy.context_tokens) == ("copy", 1, 20)
    assert _answer(stub, "copy").token_ids == before.token_ids
    queries = stub.ListFlashQueries(pb.ListFlashQueriesRequest(session_id="copy")).queries
    assert [(one.question, one.risk) for one in queries] == [(registered.question, 0.05)]


def test_an_empty_session_comes_back_too(stub):
    stub.CreateSession(pb.CreateSessionRequest(session_id="s"), timeout=WAIT_S)
    stub.Register(pb.RegisterRequest(session_id="s", question=_question()))
    assert _save(stub, "empty").context_tokens == 0
    copy = _restore(stub, "empty", "copy")
    assert (copy.version, copy.context_tokens, copy.flash_queries) == (0, 0, 1)
    assert _answer(stub, "copy").token_ids == _answer(stub, "s").token_ids


def test_a_session_that_has_gone_on_is_put_back_and_its_version_goes_on(stub):
    _session(stub)
    before = _answer(stub, "s")
    _save(stub, "monday")
    stub.Append(pb.AppendRequest(session_id="s", prompt=tokens(_ids(7, 5))), timeout=WAIT_S)
    assert _get(stub, "s").version == 2
    back = _restore(stub, "monday")
    assert (back.session_id, back.version, back.context_tokens) == ("s", 3, 20)
    assert _answer(stub, "s").token_ids == before.token_ids


def test_snapshots_are_listed_by_name_and_deleted(stub):
    _session(stub)
    named = [_save(stub, "b").name, _save(stub, "a").name, _save(stub).name]
    listed = stub.ListSnapshots(pb.ListSnapshotsRequest())
    assert [one.name for one in listed.snapshots] == sorted(named)
    stub.DeleteSnapshot(pb.DeleteSnapshotRequest(name="a"))
    listed = stub.ListSnapshots(pb.ListSnapshotsRequest())
    assert "a" not in [one.name for one in listed.snapshots] and len(listed.snapshots) == 2
    with refused(StatusCode.NOT_FOUND):
        _restore(stub, "a")


def test_of_two_that_delete_the_same_one_is_told_that_there_is_none(stub, saved, monkeypatch):
    _session(stub)
    _save(stub, "monday")
    replace = os.replace

    def delete_first(*paths):
        monkeypatch.undo()
        stub.DeleteSnapshot(pb.DeleteSnapshotRequest(name="monday"), timeout=WAIT_S)
        replace(*paths)

    monkeypatch.setattr(os, "replace", delete_first)
    with refused(StatusCode.NOT_FOUND):
        stub.DeleteSnapshot(pb.DeleteSnapshotRequest(name="monday"), timeout=WAIT_S)
    assert list(saved.iterdir()) == []


def test_what_is_half_deleted_is_not_there(stub, saved, monkeypatch):
    _session(stub)
    _save(stub, "monday")

    def killed(path, **how):
        monkeypatch.undo()
        raise OSError("killed")

    monkeypatch.setattr(shutil, "rmtree", killed)
    with refused(StatusCode.INTERNAL):
        stub.DeleteSnapshot(pb.DeleteSnapshotRequest(name="monday"), timeout=WAIT_S)
    assert stub.ListSnapshots(pb.ListSnapshotsRequest()) == pb.ListSnapshotsResponse()
    with refused(StatusCode.NOT_FOUND):
        _restore(stub, "monday")
    SnapshotStore(saved.parent, fingerprint="")
    assert list(saved.iterdir()) == []


def test_a_name_that_is_taken_stays_what_it_was(stub):
    _session(stub)
    _save(stub, "monday")
    stub.Append(pb.AppendRequest(session_id="s", prompt=tokens(_ids(7, 5))), timeout=WAIT_S)
    with refused(StatusCode.ALREADY_EXISTS) as errors:
        _save(stub, "monday")
    assert "choose another name" in errors[0].details()
    assert _restore(stub, "monday", "copy").context_tokens == 20


def test_a_tenant_has_so_many_snapshots_and_no_more(behind, tmp_path):
    model, engine = behind
    quotas = {"": Quota(max_snapshots=2)}
    store = SnapshotStore(tmp_path, fingerprint=model.fingerprint, quota_of=quotas.__getitem__)
    with grpc_service.serving(engine, model.tokenizer, snapshots=store) as running:
        stub = running.stub
        _session(stub)
        _save(stub, "a")
        (tmp_path / "tenant-" / "b.12345678.part").mkdir()  # on its way
        _save(stub, "b")
        with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:
            _save(stub, "c")
        assert errors[0].details() == (
            "max_snapshots: expected at most 2 snapshots, got 2 and 1 more; delete one, or have "
            "the quota raised"
        )
        stub.DeleteSnapshot(pb.DeleteSnapshotRequest(name="a"))
        _save(stub, "c")


def test_what_would_fill_the_disk_is_not_saved(stub, saved, monkeypatch):
    _session(stub)
    size = 20 * _bytes_per_cell(stub)
    free = snapshot_store.KEPT_FREE + size
    usage = shutil.disk_usage(saved.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    _save(stub, "fits")
    free -= 1
    with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:
        _save(stub, "too-much")
    assert "to stay free on the disk" in errors[0].details()
    assert [path.name for path in saved.iterdir()] == ["fits"]


def test_few_are_saved_at_once_and_verbs_go_on_meanwhile(running, monkeypatch):
    stub, write, go_on = running.stub, session_snapshot.write, threading.Event()
    writing: list[str] = []

    def slowly(path, snapshot):
        writing.append(path.name)
        assert go_on.wait(WAIT_S)
        write(path, snapshot)

    monkeypatch.setattr(session_snapshot, "write", slowly)
    _session(stub)
    calls = [
        stub.Snapshot.future(pb.SnapshotRequest(session_id="s", name=f"n{n}"), timeout=WAIT_S)
        for n in range(6)
    ]
    grpc_service.wait_until(lambda: len(writing) == 2)
    assert _answer(stub, "s").token_ids
    assert len(writing) == 2
    go_on.set()
    assert sorted(call.result().name for call in calls) == [f"n{n}" for n in range(6)]


NO_NAMES = ["../up", "a/b", "..", ".hidden", "x" * 200, "a\0b", "é", "x.part"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_is_refused_and_nothing_is_touched(stub, saved, name):
    _session(stub)
    calls = (
        lambda: _save(stub, name),
        lambda: _restore(stub, name),
        lambda: stub.DeleteSnapshot(pb.DeleteSnapshotRequest(name=name)),
    )
    for call in calls:
        with refused(StatusCode.INVALID_ARGUMENT) as errors:
            call()
        violations = grpc_service.detail(errors[0], "BadRequest").field_violations
        assert [one.field for one in violations] == ["name"]
    assert not saved.exists() or not list(saved.iterdir())


def test_what_a_refusal_quotes_fits_in_headers(stub):
    _session(stub)
    with refused(StatusCode.INVALID_ARGUMENT) as errors:
        _save(stub, "\N{GRINNING FACE}" * 2000)
    assert errors[0].details().endswith("\N{GRINNING FACE}…")
    details = dict(errors[0].trailing_metadata())["grpc-status-details-bin"]
    encoded = 3 * len(errors[0].details().encode()) + len(base64.b64encode(details))
    assert encoded < 8192  # what gRPC takes unless told otherwise


def test_unknown_names_and_sessions_are_not_found(stub):
    for call in (
        lambda: _save(stub, "a", session="nobody"),
        lambda: _restore(stub, "nothing"),
        lambda: stub.DeleteSnapshot(pb.DeleteSnapshotRequest(name="nothing")),
    ):
        with refused(StatusCode.NOT_FOUND):
            call()


def test_a_flipped_bit_is_data_loss_and_the_live_session_is_not_harmed(stub, saved):
    _session(stub)
    before = _answer(stub, "s")
    _save(stub, "monday")
    largest = max((saved / "monday").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with refused(StatusCode.DATA_LOSS):
        _restore(stub, "monday")
    session = _get(stub, "s")
    assert (session.version, session.context_tokens) == (1, 20)
    assert _answer(stub, "s").token_ids == before.token_ids
    (saved / "monday" / "about.json").write_text("{}")
    assert stub.ListSnapshots(pb.ListSnapshotsRequest()).damaged == ["monday"]


def test_what_was_left_half_written_is_removed(running, saved):
    _session(running.stub)
    _save(running.stub, "monday")
    os.rename(saved / "monday", saved / "monday.12345678.part")
    SnapshotStore(saved.parent, fingerprint="")
    assert list(saved.iterdir()) == []


def test_a_restore_whose_client_has_gone_replaces_nothing(running, stub, monkeypatch):
    _session(stub)
    _save(stub, "one")
    read, reading, release = session_snapshot.read, threading.Semaphore(0), threading.Event()

    def slow(*args, **how):
        reading.release()
        assert release.wait(WAIT_S)
        return read(*args, **how)

    monkeypatch.setattr(session_snapshot, "read", slow)
    request = pb.RestoreRequest(name="one", session_id="s")
    threads = running.server._backend.snapshot_threads
    for _ in range(5):  # more than there are threads for
        with refused(StatusCode.DEADLINE_EXCEEDED):
            stub.Restore(request, timeout=0.2)
    grpc_service.wait_until(lambda: running.server._backend.num_calls == 0)
    assert reading.acquire(timeout=WAIT_S) and reading.acquire(timeout=WAIT_S)
    stub.Append(pb.AppendRequest(session_id="s", prompt=tokens(_ids(5, 3))), timeout=WAIT_S)
    release.set()
    threads.submit(lambda: None).result(WAIT_S)
    _get(stub, "s")  # behind whatever was handed to the worker
    assert not reading.acquire(timeout=0.1)  # those that waited were not begun
    found = _get(stub, "s")
    assert (found.version, found.context_tokens) == (2, 25)


def test_a_server_without_a_directory_says_so(behind):
    model, engine = behind
    with grpc_service.serving(engine, model.tokenizer) as running:
        _session(running.stub)
        with refused(StatusCode.FAILED_PRECONDITION) as errors:
            _save(running.stub)
    assert "--snapshot-dir" in errors[0].details()
