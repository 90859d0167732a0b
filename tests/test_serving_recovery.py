"""A killed service starts again with all that anybody was told of, and nothing twice."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import killed_service
import pytest
import tiny_engine

from jaxstate.errors import ClosedError, InputError, JournalError, SnapshotError
from jaxstate.flash import Question
from jaxstate.prepositioning import Entry
from jaxstate.serving.journal import Journal
from jaxstate.serving.local_service import LocalService

WAIT_S = 120
CONTEXT, QUANTUM = 96, 8  # of the tiny engine


@functools.cache
def _compiled():
    return tiny_engine.build(num_pages=64)


@pytest.fixture
def engine():
    with tiny_engine.left_empty(_compiled()) as engine:
        yield engine


def _journal(directory, durability="normal"):
    return Journal(
        directory / "journal", durability=durability, fingerprint=killed_service.FINGERPRINT
    )


def _ids(seed, count):
    return tiny_engine.random_ids(seed, count)


@dataclasses.dataclass
class Model:
    """What a session has to be, worked out from what was asked and answered."""

    frozen: list[int]
    stream: list[int] = dataclasses.field(default_factory=list)
    evicted: int = 0
    version: int = 0
    may_rebuild: bool = dataclasses.field(default=False, compare=False)  # once after each start

    def agree(self, version):
        """A version that was told is this one; a rebuild of cells makes one as well."""
        if self.may_rebuild and version == self.version + 1:
            self.version, self.may_rebuild = version, False
        assert version == self.version

    def add(self, ids):
        over = len(self.frozen) + len(self.stream) + len(ids) - CONTEXT
        gone = min(-(-max(over, 0) // QUANTUM) * QUANTUM, len(self.stream))
        self.stream = self.stream[gone:] + list(ids)
        self.evicted += gone

    def apply(self, event):
        """Do what a finished verb says it did."""
        verb = event["verb"]
        if verb == "rollback":
            del self.stream[len(self.stream) - event["count"] :]
        elif verb == "update":
            common = 0
            while self.stream[common : common + 1] == event["ids"][common : common + 1] != []:
                common += 1
            del self.stream[common:]
            if event["ids"][common:]:
                self.add(event["ids"][common:])
        elif verb == "append":
            self.add(event["ids"])
        else:
            self.add([*event["ids"], *event["answer"]])
        self.version += 1


def _saved(directory):
    """What the journal has of each session, read apart from any service."""
    journal = _journal(directory)
    try:
        return {
            one.session_id: Model(
                frozen=one.tokens.frozen, stream=one.tokens.stream, evicted=one.tokens.evicted,
                version=one.tokens.version,
            )
            for one in journal.read()
        }  # fmt: skip
    finally:
        journal.close()


def _run_and_kill(directory: pathlib.Path, seed: int, rng: random.Random) -> list[dict]:
    """Start a service, kill it after some events, and return all that it said."""
    command = [sys.executable, killed_service.__file__, str(directory), str(seed), "normal"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            lines = [process.stdout.readline() for _ in range(rng.randint(1, 150))]
            time.sleep(rng.random() * 0.02)
        finally:
            process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    events = [json.loads(line) for line in lines if line.endswith(b"\n")]
    assert events, "it said nothing"
    return events


def _follow(models: dict[str, Model], events: list[dict]) -> dict[str, dict]:
    """Apply what was acknowledged; returns the verb under way of each session."""
    under_way: dict[str, dict] = {}
    for event in events:
        session = event["session"]
        if event["kind"] == "try":
            under_way[session] = event
            continue
        under_way.pop(session, None)
        if event["kind"] == "told":
            models[session].agree(event["version"])
        elif event["kind"] == "done" and event["verb"] == "create":
            models[session] = Model(frozen=event["ids"])
        elif event["kind"] == "done":
            models[session].apply(event)
            models[session].agree(event["version"])
    return under_way


def _candidates(model: Model | None, event: dict | None, found: Model | None) -> list[Model | None]:
    """What a session may be: the verb under way was done or not, cells were rebuilt or not."""
    if model is None:
        return [None, Model(frozen=event["ids"])] if event else [None]
    states = [model]
    if event is not None and found is not None:
        after = copy.deepcopy(model)
        answer = found.stream[-3:]  # drawn, but nobody has heard it
        after.apply(event | {"answer": answer})
        states.append(after)
    states += [
        dataclasses.replace(one, version=one.version + 1) for one in states if one.may_rebuild
    ]
    return states


def _kill_and_restart(engine, directory, *, times, seed):
    rng = random.Random(seed)
    models: dict[str, Model] = {}
    last: dict[str, dict] = {}  # numbered append of each session
    applied = 0
    for turn in range(times):
        for model in models.values():
            model.may_rebuild = model.evicted > 0
        events = _run_and_kill(directory, 100 * seed + turn, rng)
        under_way = _follow(models, events)
        found = _saved(directory)
        for session in set(models) | set(under_way):
            there, event = found.get(session), under_way.get(session)
            assert there in _candidates(models.get(session), event, there), (session, event)
            if there is not None:
                models[session] = there
        for event in events:
            if event["kind"] == "done" and event["verb"] == "append":
                last[event["session"]] = event
        service = LocalService(engine, journal=_journal(directory))
        for session, model in models.items():
            _check_answers(service, session, model)
            applied += _check_retries(service, session, model, last, under_way)
        service.close()
        for session, model in models.items():
            assert (model.stream, model.version) == (
                engine.session(session).token_ids[3:], engine.session(session).version
            )  # fmt: skip
            engine.close(session)
        assert engine.cells_held == 0
        assert _saved(directory) == models
    return applied


def _check_retries(service, session, model, last, under_way):
    """Appends that come again are applied once, whether they were before the kill or not."""
    if session in last:
        event = last[session]
        number = (session, event["sequence"])
        again = service.append(session, event["ids"], number=number).result(WAIT_S)
        assert again == event["version"]
    event = under_way.get(session)
    if event is None or event["verb"] != "append":
        return 0
    number = (session, event["sequence"])
    version = service.append(session, event["ids"], number=number).result(WAIT_S)
    if version > model.version:  # it had not been written when the process was killed
        model.apply(event)
        assert version == model.version
    return 1


def _check_answers(service, session, model):
    """Cells are computed anew: from the kept tokens, which the answer says where some are gone."""
    question = Question(token_ids=tuple(_ids(9, 3)), max_new_tokens=2)
    context = [*model.frozen, *model.stream]
    answer = service.query(session, question).result(WAIT_S)
    want = tiny_engine.greedy([*context, *question.token_ids], 2)
    assert answer.token_ids == tuple(want)
    assert answer.rebuilt == bool(model.evicted)
    model.version += answer.version - model.version if model.evicted else 0
    assert answer.version == model.version


def test_a_killed_service_starts_again_with_all_that_was_acknowledged(engine, tmp_path):
    _kill_and_restart(engine, tmp_path, times=2, seed=1)


@pytest.mark.long
def test_a_service_killed_many_times_loses_nothing_and_doubles_nothing(engine, tmp_path):
    assert _kill_and_restart(engine, tmp_path, times=30, seed=2) > 3


def test_the_journal_has_what_a_session_is_after_every_verb(engine, tmp_path):
    service = LocalService(engine, journal=_journal(tmp_path / "live"))
    session = service.create(_ids(1, 3), when_full="slide")
    verbs = [
        lambda: service.append(session, _ids(1, 70)),
        lambda: service.rollback(session, 4),
        lambda: service.append(session, _ids(2, 29)),  # slides
        lambda: service.rollback(session, 2),
        lambda: service.rollback(session, 3),
        lambda: service.update(session, engine.session(session).token_ids[3:80]),  # cuts
        lambda: service.update(session, engine.session(session).token_ids[3:70] + _ids(3, 4)),
        lambda: service.query(session, _question(4, max_new_tokens=20), commit=True),
        lambda: service.query(session, _question(5, max_new_tokens=9), commit=True),
    ]
    for turn, verb in enumerate(verbs):
        verb().result(WAIT_S)
        if turn == 2:
            service.fork(session, new_id="fork")
        copy_of = tmp_path / f"killed{turn}"
        shutil.copytree(tmp_path / "live", copy_of)
        found = _saved(copy_of)
        assert sorted(found) == sorted(engine.session_ids)
        for name, model in found.items():
            record = engine.session(name)
            assert [*model.frozen, *model.stream] == record.token_ids
            assert (model.version, model.evicted) == (record.version, record.evicted)
    assert engine.session(session).evicted == 24 and len(found) == 2
    service.close()


def test_a_numbered_verb_that_comes_again_after_a_kill_is_applied_once(engine, tmp_path):
    service = LocalService(engine, journal=_journal(tmp_path / "live"))
    session = service.create(_ids(1, 5))
    for number in (1, 2):
        service.append(session, _ids(number, 4), number=("feed", number)).result(WAIT_S)
    service.rollback(session, 1, number=("feed", 3)).result(WAIT_S)
    service.update(session, _ids(7, 4), number=("feed", 4)).result(WAIT_S)
    shutil.copytree(tmp_path / "live", tmp_path / "killed")  # what a kill would leave now
    service.close()
    engine.close(session)
    service = LocalService(engine, journal=_journal(tmp_path / "killed"))
    assert service.append(session, _ids(2, 4), number=("feed", 2)).result(WAIT_S) == 2
    assert service.rollback(session, 1, number=("feed", 3)).result(WAIT_S) == 3
    assert service.update(session, _ids(7, 4), number=("feed", 4)).result(WAIT_S) == 4
    with pytest.raises(InputError, match="expected what writer"):
        service.append(session, _ids(9, 4), number=("feed", 1))
    assert service.append(session, _ids(3, 4), number=("feed", 5)).result(WAIT_S) == 5
    assert engine.session(session).token_ids == [*_ids(1, 5), *_ids(7, 4), *_ids(3, 4)]
    service.close()


def _question(seed, **how):
    return Question(token_ids=tuple(_ids(seed, 4)), **how)


def test_what_was_registered_comes_back_with_its_gates(engine, tmp_path):
    free, choice = _question(1, max_new_tokens=2), _question(2, choices=((1, 2), (3, 4)))
    header = Entry(token_ids=free.token_ids[:2])
    service = LocalService(engine, journal=_journal(tmp_path))
    session = service.create(_ids(1, 9), tenant="t")
    service.register(session, _question(3))
    flash = service.register(session, choice, risk=0.05)
    service.unregister(session, 1)
    service.register(session, free)
    service.declare(session, header)
    for seed in range(5):
        service.append(session, _ids(seed, 3)).result(WAIT_S)
        service.wait_until_idle(WAIT_S)
    before = flash.stale.to_json()
    assert len(flash.stale.samples) == 5
    service.close()
    engine.close(session)
    service = LocalService(engine, journal=_journal(tmp_path))
    found = {one.flash_id: one for one in service.flash_queries(session)}
    asked = {flash_id: (one.question.key, one.risk) for flash_id, one in found.items()}
    assert asked == {2: (choice.key, 0.05), 3: (free.key, None)}
    assert found[2].stale.to_json() == before
    service.wait_until_idle(WAIT_S)  # answered again at the version of the gates' last samples
    assert service.query(session, free).result(WAIT_S).version == 5
    assert [len(gate.samples) for gate in (flash.stale, flash.first)] == [5, 6]
    for one in service.flash_queries(session):
        assert one.error is None
    assert service._sessions[session].prepositions.is_declared(header.token_ids)
    assert service.register(session, _question(7)).flash_id == 4
    [info] = service.describe_all()
    assert (info.session_id, info.tenant, info.version, info.num_flash) == (session, "t", 5, 3)
    service.close_session(session)
    service.close()
    service = LocalService(engine, journal=_journal(tmp_path))
    assert service.describe_all() == []
    service.close()


def test_a_fork_and_a_rollback_of_a_session_whose_cells_are_not_there_yet(engine, tmp_path):
    service = LocalService(engine, journal=_journal(tmp_path))
    session = service.create(_ids(1, 5), session_id="one", when_full="slide")
    for seed in range(7):
        service.append(session, _ids(seed, 19)).result(WAIT_S)
    kept = list(engine.session(session).token_ids)
    service.close()
    engine.close(session)
    service = LocalService(engine, journal=_journal(tmp_path))
    service.fork(session, new_id="two")
    assert service.rollback("two", 2).result(WAIT_S) == service.version("two")
    question = _question(3, max_new_tokens=2)
    answer = service.query("two", question).result(WAIT_S)
    assert answer.rebuilt
    want = tiny_engine.greedy([*kept[:-2], *question.token_ids], 2)
    assert answer.token_ids == tuple(want)
    service.close()


def test_without_room_for_a_saved_session_a_service_does_not_start(engine, tmp_path):
    service = LocalService(engine, journal=_journal(tmp_path))
    session = service.create(_ids(1, 90))
    service.close()
    engine.close(session)
    small = tiny_engine.build(num_pages=64, context_len=64)
    with pytest.raises(SnapshotError, match="expected at most context_len=64 tokens, got 90"):
        LocalService(small, journal=_journal(tmp_path))


def test_nobody_is_told_of_what_could_not_be_written(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the worker ends by it
    journal = _journal(tmp_path)
    service = LocalService(engine, journal=journal)
    session = service.create(_ids(1, 9))
    service.append(session, _ids(2, 9)).result(WAIT_S)
    journal._database.close()  # what a lost disk does to it
    with pytest.raises(JournalError, match="could not be written"):
        service.append(session, _ids(3, 9)).result(WAIT_S)
    with pytest.raises(ClosedError, match="could not be written"):
        service.append(session, _ids(3, 9))
    service.close()
    engine.close(session)
    assert _saved(tmp_path)[session].stream == _ids(2, 9)


def test_a_caller_is_told_after_the_commit_and_never_before(engine, tmp_path, monkeypatch):
    journal = _journal(tmp_path)
    service = LocalService(engine, journal=journal)
    session = service.create(_ids(1, 9))
    commit = journal.commit
    seen = []

    def slowly():
        time.sleep(0.05)
        for ticket in service._writes.under_way(session):
            if ticket.has_ended:
                seen.append((ticket.is_over, service.version(session)))
        commit()

    service.append(session, _ids(2, 9)).result(WAIT_S)
    monkeypatch.setattr(journal, "commit", slowly)
    assert service.append(session, _ids(3, 9)).result(WAIT_S) == 2
    assert seen == [(False, 1)]
    monkeypatch.setattr(journal, "commit", commit)
    service.close()
