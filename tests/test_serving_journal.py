"""A journal holds what was acknowledged, whenever its process is killed, or it says no."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import shutil

import pytest

from jaxstate.calibration import ShadowSample
from jaxstate.errors import ForeignSnapshotError, JournalError, SnapshotError
from jaxstate.flash import FlashQuery, Question
from jaxstate.prepositioning import Entry
from jaxstate.sampling import Sampling
from jaxstate.serving import journal as journal_module
from jaxstate.serving.journal import Journal
from jaxstate.session import Session

MODEL = "model-1"


def _open(path, durability="normal", fingerprint=MODEL):
    return Journal(path, durability=durability, fingerprint=fingerprint)


def _session(name="s1", frozen=(1, 2), **more):
    return Session(
        session_id=name, owner=0, when_full="slide", frozen_len=len(frozen), token_ids=[*frozen],
        **more,
    )  # fmt: skip


def _edit(session, rng):
    """What a durable verb does to a session's record: cut the end, drop the oldest, add behind."""
    kept = session.context_len - session.frozen_len
    cut = rng.choice([0, 0, rng.randint(0, min(kept, 5))])
    cut = min(cut, session.stream_len - session.stream_floor)
    if cut:
        del session.token_ids[session.context_len - cut :]
        session.saved_len = min(session.saved_len, session.stream_len)
    kept = session.context_len - session.frozen_len
    if kept > 8 and rng.random() < 0.5:
        session.stream_floor = session.stream_len
        del session.token_ids[session.frozen_len : session.frozen_len + 4]
        session.evicted += 4
    session.token_ids.extend(rng.randrange(97) for _ in range(rng.randint(0 if cut else 1, 6)))
    session.version += 1


def _record(session):
    return (
        session.session_id, tuple(session.token_ids), session.frozen_len, session.evicted,
        session.stream_floor, session.version, session.rebuilt,
    )  # fmt: skip


def _read(path, **how):
    """What a restart finds: each session's record."""
    journal = _open(path, **how)
    try:
        found = {}
        for one in journal.read():
            tokens = one.tokens
            found[one.session_id] = (
                one.session_id, (*tokens.frozen, *tokens.stream), len(tokens.frozen),
                tokens.evicted, tokens.stream_floor, tokens.version, tokens.rebuilt,
            )  # fmt: skip
        return found
    finally:
        journal.close()


def _copy(path: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """The files as a process killed now would leave them."""
    to.mkdir(parents=True)
    for file in path.parent.glob(path.name + "*"):
        shutil.copy(file, to)
    return to / path.name


@pytest.mark.parametrize("durability", ["full", "normal"])
def test_killed_between_any_two_statements_it_holds_what_was_acknowledged(
    tmp_path, durability, monkeypatch
):
    monkeypatch.setattr(journal_module, "FOLD", 5)
    rng = random.Random(1)
    path = tmp_path / "live" / "journal"
    journal = _open(path, durability)
    sessions: dict[str, Session] = {}
    allowed = [{}, {}]  # what was acknowledged, and that with the commit under way
    killed = []

    def at_statement(_):
        killed.append((_copy(path, tmp_path / f"{len(killed)}"), *allowed))

    journal._database.set_trace_callback(at_statement)
    for turn in range(24):
        if not sessions or rng.random() < 0.15:
            name = f"s{turn}"
            sessions[name] = _session(name, frozen=[rng.randrange(97) for _ in range(3)])
            journal.create(sessions[name])
        if len(sessions) > 2:
            gone = rng.choice(list(sessions))
            journal.close_session(gone)
            del sessions[gone]
        for name in rng.sample(list(sessions), k=rng.randint(1, len(sessions))):
            _edit(sessions[name], rng)
            journal.change(sessions[name])
        allowed[1] = {name: _record(session) for name, session in sessions.items()}
        journal.commit()
        allowed[0] = allowed[1]
        at_statement("")
    journal.close()
    assert len(killed) > 100
    for copy, acknowledged, under_way in killed:
        found = _read(copy, durability=durability)
        assert found in (acknowledged, under_way)
    assert _read(path) == allowed[0]


def test_what_belongs_to_a_session_comes_back(tmp_path):
    question = Question(
        token_ids=(4, 5), max_new_tokens=3, eos_ids=(9,),
        sampling=Sampling(temperature=0.5, seed=7, logit_bias={3: float("-inf"), 1: 2.5}),
    )  # fmt: skip
    query = FlashQuery(flash_id=3, question=question, risk=0.05)
    for version in range(1, 130):
        query.stale.add(
            ShadowSample(gap=4.0, agreed=True, stale_version=version - 1, version=version)
        )
    query.headers.setdefault((4,), type(query.stale)())
    query.stale.decide(0.05, 3.0, age=1)
    choice = FlashQuery(flash_id=5, question=Question(token_ids=(6,), choices=((1, 2), (3,))))
    header = Entry(token_ids=(4,), max_new_tokens=2, min_gap=0.5, slot_ids=(8,))
    journal = _open(tmp_path / "journal")
    journal.create(_session())
    journal.question("s1", choice)
    journal.question("s1", query)
    journal.question("s1", FlashQuery(flash_id=6, question=Question(token_ids=(6,))))
    journal.unregister("s1", 6)
    journal.declare("s1", header)
    for sequence in (1, 2):
        journal.number("s1", ("feed", sequence), b"digest", sequence)
    journal.snapshot("s1", "one")
    journal.commit()
    journal.close()
    journal = _open(tmp_path / "journal")
    [saved] = journal.read()
    journal.close()
    found = [(one.flash_id, one.question.key, one.risk) for one in saved.queries]
    assert found == [(3, question.key, 0.05), (5, choice.question.key, None)]
    assert saved.queries[0].stale.to_json() == query.stale.to_json()
    assert list(saved.queries[0].headers) == [(4,)]
    assert saved.headers == [header]
    assert [dataclasses.astuple(one) for one in saved.numbers] == [
        ("feed", 1, b"digest", 1), ("feed", 2, b"digest", 2)
    ]  # fmt: skip
    assert saved.snapshot == "one"


def test_old_numbers_go_but_for_each_writers_highest(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "FOLD", 3)
    monkeypatch.setattr(journal_module, "REMEMBERED", 4)
    journal = _open(tmp_path / "journal")
    session, rng = _session(), random.Random(2)
    journal.create(session)
    for sequence in range(1, 13):
        _edit(session, rng)
        journal.change(session)
        writer = "once" if sequence == 2 else "feed"
        journal.number("s1", (writer, sequence), b"", session.version)
        journal.commit()
    numbers = [(one.writer, one.sequence) for one in journal.read()[0].numbers]
    journal.close()
    assert ("once", 2) in numbers and len(numbers) <= 4 + 1 + 3
    assert [sequence for writer, sequence in numbers if writer == "feed"][-4:] == [9, 10, 11, 12]


def _written(path, turns=40):
    """A journal of a few sessions, its last changes only in the log; returns their records."""
    journal = _open(path)
    sessions = [_session(f"s{n}", frozen=range(n, n + 40)) for n in range(3)]
    rng = random.Random(3)
    for session in sessions:
        journal.create(session)
    for _ in range(turns):
        for session in sessions:
            _edit(session, rng)
            journal.change(session)
        journal.commit()
    return journal, {session.session_id: _record(session) for session in sessions}


@pytest.mark.parametrize("kept_in", ["database", "log"])
def test_a_flipped_bit_is_noticed_or_does_no_harm(tmp_path, kept_in):
    path = tmp_path / "live" / "journal"
    journal, records = _written(path)
    if kept_in == "database":
        journal.close()
    whole = _copy(path, tmp_path / "whole")
    if kept_in == "log":
        journal.close()
    file = "journal" if kept_in == "database" else "journal-wal"
    assert _read(_copy(whole, tmp_path / "checked")) == records
    size = (whole.parent / file).stat().st_size
    rng = random.Random(4)
    refused = 0
    for turn in range(150):
        copy = _copy(whole, tmp_path / f"{turn}")
        data = bytearray((copy.parent / file).read_bytes())
        at = rng.randrange(size)
        data[at] ^= 1 << rng.randrange(8)
        (copy.parent / file).write_bytes(data)
        try:
            found = _read(copy)
        except SnapshotError:
            refused += 1
        else:
            assert found == records, at
    assert refused > 10


def test_a_log_that_lost_acknowledged_changes_is_refused(tmp_path):
    path = tmp_path / "live" / "journal"
    journal, _ = _written(path)
    copy = _copy(path, tmp_path / "copy")
    journal.close()
    log = copy.with_name("journal-wal")
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    with pytest.raises(SnapshotError, match="was acknowledged, the newest there is"):
        _open(copy)
    copy.with_name("journal.acknowledged").unlink()
    assert _read(copy)  # as the message says


def test_a_journal_of_another_model_or_in_use_is_refused(tmp_path):
    journal = _open(tmp_path / "journal")
    with pytest.raises(JournalError, match="another process uses it"):
        _open(tmp_path / "journal")
    journal.close()
    with pytest.raises(ForeignSnapshotError, match="fingerprint expected model-2, got model-1"):
        _open(tmp_path / "journal", fingerprint="model-2")
    (tmp_path / "text").write_text("no database, but long enough to be taken for one" * 100)
    with pytest.raises(SnapshotError, match="damaged"):
        _open(tmp_path / "text")
    with pytest.raises(ValueError, match='durability: expected "full" or "normal"'):
        _open(tmp_path / "off", "off")
    assert not (tmp_path / "off").exists()


def test_what_cannot_be_written_is_an_error_from_then_on(tmp_path):
    journal = _open(tmp_path / "journal")
    journal.create(_session())
    journal.commit()
    pages = journal._run("PRAGMA page_count").fetchone()[0]
    journal._run(f"PRAGMA max_page_count = {pages}")  # the disk is full
    session = _session("s2", frozen=range(5000))
    journal.create(session)
    with pytest.raises(JournalError, match="could not be written: database or disk is full"):
        journal.commit()
    with pytest.raises(JournalError, match="restart the service"):
        journal.commit()
    journal.close()
    assert list(_read(tmp_path / "journal")) == ["s1"]
