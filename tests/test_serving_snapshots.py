"""What a service saves of its sessions by itself is what the next one starts with."""

from __future__ import annotations

import functools
import time

import grpc
import numpy as np
import pytest
import tiny_engine
import tiny_service
from oracle.history import History

from jaxstate import cell_copy, session_snapshot
from jaxstate.errors import CancelledError, ForeignSnapshotError, InputError, SnapshotError
from jaxstate.flash import Question
from jaxstate.prepositioning import Entry
from jaxstate.serving import rpc_errors
from jaxstate.serving.journal import Journal
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.snapshots import Snapshots

WAIT_S = 120
MODEL = "tiny"
CONTEXT, QUANTUM = 96, 8  # of the tiny engine


@functools.cache
def _compiled():
    return tiny_engine.build(num_pages=64, host_bytes=1 << 20)


@pytest.fixture
def engine():
    with tiny_engine.left_empty(_compiled()) as engine:
        yield engine


def _ids(seed, count):
    return tiny_engine.random_ids(seed, count)


def _start(engine, directory, *, idle_s=1e9, saves=True):
    for name in engine.session_ids:  # what the service before left there
        engine.close(name)
    journal = Journal(directory / "journal", durability="normal", fingerprint=MODEL)
    snapshots = Snapshots(directory / "snapshots", fingerprint=MODEL, idle_s=idle_s)
    return LocalService(engine, journal=journal, snapshots=snapshots if saves else None)


class Truth:
    """A sliding session by the history-true reference."""

    def __init__(self, frozen):
        self.history = History(tiny_engine.params(), tiny_engine.MODEL)
        self.frozen_len = len(frozen)
        self.context = self.history.extend((), frozen)

    def append(self, ids):
        over = len(self.context) + len(ids) - CONTEXT
        self.drop(-(-max(over, 0) // QUANTUM) * QUANTUM)
        self.context += self.history.extend(self.context, ids)

    def turn(self, question, answer):
        over = len(self.context) + len(question) + len(answer) - CONTEXT
        self.context += self.history.extend(self.context, [*question, *answer])
        self.drop(-(-max(over, 0) // QUANTUM) * QUANTUM)

    def drop(self, count):
        self.context = self.context[: self.frozen_len] + self.context[self.frozen_len + count :]

    def rollback(self, count):
        self.context = self.context[: len(self.context) - count]

    def greedy(self, question, count):
        context = self.context + self.history.extend(self.context, question)
        ids = []
        for _ in range(count):
            ids.append(int(self.history.logits(context[-1]).argmax()))
            context += self.history.extend(context, ids[-1:])
        return tuple(ids)


def _ask(service, session, seed=3, **how):
    question = Question(token_ids=tuple(_ids(seed, 4)), max_new_tokens=3)
    return service.query(session, question, **how).result(WAIT_S), list(question.token_ids)


def _stream(service, session, truth, seeds):
    for seed in seeds:
        service.append(session, _ids(seed, 17)).result(WAIT_S)
        truth.append(_ids(seed, 17))


def _check(service, session, truth, version):
    answer, question = _ask(service, session)
    assert (answer.version, answer.rebuilt) == (version, False)
    assert answer.token_ids == truth.greedy(question, 3)


def test_a_slid_session_that_was_saved_at_the_end_goes_on_as_if_nothing_had_been(engine, tmp_path):
    service = _start(engine, tmp_path)
    session, truth = service.create(_ids(1, 5), when_full="slide"), Truth(_ids(1, 5))
    _stream(service, session, truth, range(8))
    service.close()
    forwarded = engine.executor.tokens_forwarded
    service = _start(engine, tmp_path)
    _check(service, session, truth, 8)
    assert engine.executor.tokens_forwarded - forwarded < 16  # the question alone
    _stream(service, session, truth, range(20, 23))
    _check(service, session, truth, 11)
    service.close()


def test_what_is_being_saved_when_a_service_ends_is_saved(engine, tmp_path, monkeypatch):
    write = session_snapshot.write
    monkeypatch.setattr(session_snapshot, "write", lambda *args: (time.sleep(0.3), write(*args)))
    service = _start(engine, tmp_path, idle_s=0.0)
    session, truth = service.create(_ids(1, 5), when_full="slide"), Truth(_ids(1, 5))
    _stream(service, session, truth, range(7))
    _wait_until(lambda: service._durable._snapshots._writing)
    assert not any("-7-" in name for name in _names(tmp_path))
    service.close()
    [name] = _names(tmp_path)
    assert "-7-" in name
    service = _start(engine, tmp_path)
    _check(service, session, truth, 7)
    service.close()


def test_what_waits_outside_of_the_pool_is_saved_at_the_end(engine, tmp_path):
    service = _start(engine, tmp_path)
    sessions = [service.create(_ids(n, 5), when_full="slide") for n in range(3)]
    truths = [Truth(_ids(n, 5)) for n in range(3)]
    for session, truth in zip(sessions, truths, strict=True):
        _stream(service, session, truth, range(7))
    service._call(lambda: engine.move_out(sessions[0], "host"))
    service.close()
    service = _start(engine, tmp_path)
    for session, truth in zip(sessions, truths, strict=True):
        _check(service, session, truth, 7)
    service.close()


@pytest.mark.parametrize("change", ["append", "update"])
def test_a_change_that_ends_with_its_service_has_never_begun(engine, tmp_path, change):
    service = _start(engine, tmp_path)
    session, truth = service.create(_ids(1, 5), when_full="slide"), Truth(_ids(1, 5))
    _stream(service, session, truth, range(6))
    service.close()  # saved
    service = _start(engine, tmp_path)
    _stream(service, session, truth, range(6, 8))
    tokens = list(engine.session(session).token_ids)
    with tiny_service.held_behind_a_step(service) as ran:
        ids = _ids(9, 40) if change == "append" else [*tokens[5:-17], *_ids(9, 17)]
        pending = getattr(service, change)(session, ids)
        assert ran.wait(WAIT_S)
        service._commands.close()
    with pytest.raises(CancelledError):
        pending.result(WAIT_S)
    service.close()
    assert (engine.session(session).token_ids, engine.session(session).version) == (tokens, 8)
    service = _start(engine, tmp_path)
    assert engine.session(session).token_ids == tokens
    _check(service, session, truth, 8)
    if change == "append":
        service.append(session, ids).result(WAIT_S)
        truth.append(ids)
        _check(service, session, truth, 9)
    service.close()


def test_what_goes_wrong_with_one_snapshot_keeps_no_other_from_being_saved(
    engine, tmp_path, monkeypatch
):
    failures = []

    def break_first(function):
        def broken(*args, **how):
            if failures:
                raise failures.pop()
            return function(*args, **how)

        return broken

    service = _start(engine, tmp_path, idle_s=0.0)
    for name in ("write", "take"):
        before = getattr(session_snapshot, name)
        failures[:] = [MemoryError()]
        with monkeypatch.context() as patch:
            patch.setattr(session_snapshot, name, break_first(before))
            session, truth = service.create(_ids(1, 5)), Truth(_ids(1, 5))
            _wait_until(lambda: not failures)
            _stream(service, session, truth, range(3))
            _wait_until(lambda: any("-3-" in name for name in _names(tmp_path)))
        service.close_session(session)
        _wait_until(lambda: not _names(tmp_path))
    session, truth = service.create(_ids(1, 5), when_full="slide"), Truth(_ids(1, 5))
    _stream(service, session, truth, range(8))
    service.close()
    service = _start(engine, tmp_path)
    _check(service, session, truth, 8)
    service.close()


def test_what_came_after_a_snapshot_is_done_again_as_it_was(engine, tmp_path):
    service = _start(engine, tmp_path)
    session, truth = service.create(_ids(1, 5), when_full="slide"), Truth(_ids(1, 5))
    _stream(service, session, truth, range(6))
    service.close()
    service = _start(engine, tmp_path)
    service._durable._snapshots.save = lambda *_: ""  # from now on only the journal knows
    _check(service, session, truth, 6)
    service.rollback(session, 5).result(WAIT_S)
    truth.rollback(5)
    _stream(service, session, truth, range(20, 22))  # evicts
    for seed in (30, 31, 32):
        answer, question = _ask(service, session, seed, commit=True)
        truth.turn(question, answer.token_ids)
    _stream(service, session, truth, range(40, 42))
    _check(service, session, truth, 14)
    before = _cells(service, session)
    service.close()
    service = _start(engine, tmp_path)
    _check(service, session, truth, 14)
    for one, other in zip(before, _cells(service, session), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)  # as computed in other steps
    service.close()


def test_a_session_at_rest_is_saved_once_and_the_older_snapshot_goes(engine, tmp_path):
    service = _start(engine, tmp_path, idle_s=0.05)
    session = service.create(_ids(1, 5))
    saved: list[str] = []
    for seed in range(2):
        service.append(session, _ids(seed, 17)).result(WAIT_S)
        _wait_until(lambda: len(_names(tmp_path)) == 1 and _names(tmp_path) != saved[-1:])
        saved.extend(_names(tmp_path))
    assert len(set(saved)) == 2
    service.close()
    assert _names(tmp_path) == saved[-1:]  # nothing has changed since
    service = _start(engine, tmp_path, idle_s=0.05)
    assert _names(tmp_path) == saved[-1:]
    service.close_session(session)
    assert _names(tmp_path) == []
    service.close()


def _wait_until(condition):
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def _cells(service, session):
    """The cells that a session sees, in order of position, and their shifts."""
    engine = service._engine
    table = engine.session(session).entries
    cells, shifts = service._call(lambda: cell_copy.take(engine.executor, table))
    return [*(array for layer in cells for array in layer), shifts]


def _names(directory):
    return [one.name for one in (directory / "snapshots").iterdir() if one.suffix != ".part"]


@pytest.mark.parametrize("harm", ["damaged", "gone"])
def test_without_its_snapshot_a_session_is_rebuilt_and_says_so(engine, tmp_path, harm):
    service = _start(engine, tmp_path)
    slid = service.create(_ids(1, 5), when_full="slide")
    whole = service.create(_ids(2, 30))
    for seed in range(8):
        service.append(slid, _ids(seed, 17)).result(WAIT_S)
    kept = list(engine.session(slid).token_ids)
    service.close()
    for name in _names(tmp_path):
        about = tmp_path / "snapshots" / name / "about.json"
        if harm == "gone":
            about.unlink()
        else:
            about.write_text(about.read_text().replace('"evicted": ', '"evicted": 1'))
    service = _start(engine, tmp_path)
    answer, question = _ask(service, slid)
    assert (answer.rebuilt, answer.version) == (True, 9)
    assert answer.token_ids == tuple(tiny_engine.greedy([*kept, *question], 3))
    answer, question = _ask(service, whole)
    assert (answer.rebuilt, answer.version) == (False, 0)
    assert answer.token_ids == tuple(tiny_engine.greedy([*_ids(2, 30), *question], 3))
    service.close()


def test_snapshots_need_a_journal(engine, tmp_path):
    snapshots = Snapshots(tmp_path, fingerprint=MODEL)
    with pytest.raises(ValueError, match="snapshots: expected a journal"):
        LocalService(engine, snapshots=snapshots)


def test_a_service_saves_a_session_and_restores_it_with_its_questions(engine, tmp_path):
    service = _start(engine, tmp_path)
    session, truth = service.create(_ids(1, 5), when_full="slide"), Truth(_ids(1, 5))
    question = Question(token_ids=tuple(_ids(3, 4)), max_new_tokens=3)
    flash = service.register(session, question, risk=0.05)
    service.declare(session, Entry(token_ids=tuple(_ids(4, 3))))
    for seed in range(8):
        _stream(service, session, truth, [seed])
        service.wait_until_idle(WAIT_S)
    samples = len(flash.stale.samples)
    assert service.snapshot(session, tmp_path / "one", fingerprint=MODEL) == 8
    service.append(session, _ids(50, 9), number=("feed", 1)).result(WAIT_S)
    assert service.restore(tmp_path / "one", fingerprint=MODEL) == session
    _check(service, session, truth, 10)
    assert service.append(session, _ids(50, 9), number=("feed", 1)).result(WAIT_S) == 9
    assert service.version(session) == 10  # it was done, and undone
    [found] = service.flash_queries(session)
    assert (found.flash_id, found.question.key, found.risk) == (1, question.key, 0.05)
    assert len(found.stale.samples) >= samples - 1
    copy = service.restore(tmp_path / "one", fingerprint=MODEL, session_id="copy", tenant="t")
    _check(service, copy, truth, 8)
    service.close()
    service = _start(engine, tmp_path)
    infos = [(one.session_id, one.tenant, one.version) for one in service.describe_all()]
    assert infos == [("copy", "t", 8), (session, "", 10)]
    for name, version in (("copy", 8), (session, 10)):
        _check(service, name, truth, version)
        assert [one.question.key for one in service.flash_queries(name)] == [question.key]
    service.close()


def test_only_what_a_service_has_saved_itself_is_removed_from_its_directory(engine, tmp_path):
    directory = tmp_path / "snapshots"
    ours, half = f"{'a' * 12}-7-{'b' * 8}", f"{'a' * 12}-7-{'b' * 8}.{'c' * 8}.part"
    for name in ("tenant-", "notes", ours, half):
        (directory / name).mkdir(parents=True)
    service = _start(engine, tmp_path)
    service.close()
    assert sorted(path.name for path in directory.iterdir()) == ["notes", "tenant-"]


@pytest.mark.parametrize("where", ["restored over", "restored anew", "started again"])
def test_a_question_never_gets_the_id_of_another(engine, tmp_path, where):
    service = _start(engine, tmp_path)
    session = service.create(_ids(1, 5))
    questions = [Question(token_ids=tuple(_ids(n, 4)), max_new_tokens=1) for n in range(4)]
    ids = [service.register(session, one).flash_id for one in questions[:2]]
    service.unregister(session, ids[1])
    if where != "started again":
        service.snapshot(session, tmp_path / "one", fingerprint=MODEL)
    ids += [service.register(session, questions[2]).flash_id]
    service.unregister(session, ids[2])
    if where == "restored over":
        service.restore(tmp_path / "one", fingerprint=MODEL)
    if where == "restored anew":
        service.close_session(session)
        ids.pop()  # of a session that is closed
        service.restore(tmp_path / "one", fingerprint=MODEL)
    service.close()
    service = _start(engine, tmp_path)
    assert [one.flash_id for one in service.flash_queries(session)] == ids[:1]
    assert service.register(session, questions[3]).flash_id == max(ids) + 1
    service.close()


def test_numbered_verbs_of_a_saved_session_are_applied_once_when_it_is_opened_again(
    engine, tmp_path
):
    service = _start(engine, tmp_path)
    session = service.create(_ids(1, 5))
    assert service.append(session, _ids(2, 3), number=("feed", 1)).result(WAIT_S) == 1
    service.snapshot(session, tmp_path / "one", fingerprint=MODEL)
    assert service.append(session, _ids(3, 3), number=("feed", 2)).result(WAIT_S) == 2
    service.close_session(session)
    service.restore(tmp_path / "one", fingerprint=MODEL)
    for _ in range(2):
        assert service.append(session, _ids(2, 3), number=("feed", 1)).result(WAIT_S) == 1
        assert service.version(session) == 1
        with pytest.raises(InputError, match="expected what writer"):
            service.append(session, _ids(9, 3), number=("feed", 1))
        service.close()
        service = _start(engine, tmp_path)
    assert service.append(session, _ids(3, 3), number=("feed", 2)).result(WAIT_S) == 2
    assert engine.session(session).token_ids == [*_ids(1, 5), *_ids(2, 3), *_ids(3, 3)]
    service.close()


@pytest.mark.parametrize("harm", ["damaged", "foreign"])
def test_what_cannot_be_restored_leaves_the_live_session_as_it_is(engine, tmp_path, harm):
    service = _start(engine, tmp_path)
    session = service.create(_ids(1, 30))
    service.snapshot(session, tmp_path / "one", fingerprint=MODEL)
    service.append(session, _ids(2, 9)).result(WAIT_S)
    if harm == "damaged":
        (tmp_path / "one" / "about.json").write_text("{}")
        code, fingerprint, error = grpc.StatusCode.DATA_LOSS, MODEL, SnapshotError
    else:
        code, fingerprint = grpc.StatusCode.FAILED_PRECONDITION, "another"
        error = ForeignSnapshotError
    with pytest.raises(error) as caught:
        service.restore(tmp_path / "one", fingerprint=fingerprint)
    assert rpc_errors.code_of(caught.value) is code
    answer, question = _ask(service, session)
    assert answer.version == 1
    context = [*_ids(1, 30), *_ids(2, 9), *question]
    assert answer.token_ids == tuple(tiny_engine.greedy(context, 3))
    service.close()
