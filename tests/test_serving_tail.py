"""`jaxstate tail`: rows of real files into a real server, each once, over rotation and restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import cut_proxy
import grpc_service
import pytest
from rich.console import Console

from jaxstate.errors import InputError, JaxStateError, UnknownSessionError
from jaxstate.serving import Client, tail_command, tail_view
from jaxstate.serving.client_types import FreshAnswer
from jaxstate.serving.tail_command import TailOptions
from jaxstate.serving.tail_file import Follower
from jaxstate.serving.tail_position import Progress

PROGRAM = "import sys; from jaxstate.serving import cli; sys.exit(cli.main())"
ASK = "up?"


# Lines of a file


def _texts(follower):
    found = []
    while lines := follower.poll():
        found += [line.text for line in lines]
    return found


@pytest.fixture
def follow():
    """Followers, closed at the end."""
    with contextlib.ExitStack() as ends:
        yield lambda *args, **how: ends.enter_context(contextlib.closing(Follower(*args, **how)))


@pytest.fixture
def log(tmp_path):
    return tmp_path / "feed.log"


def _write(path, text, mode="a"):
    with path.open(mode, newline="") as file:
        file.write(text)


def test_a_line_waits_for_its_newline(log, follow):
    _write(log, "a\nb\nhal")
    follower = follow(log)
    assert _texts(follower) == ["a", "b"]
    _write(log, "f")
    assert _texts(follower) == []
    _write(log, "\r\nc\n")
    assert _texts(follower) == ["half", "c"]


def test_a_file_that_comes_later_is_read_from_its_beginning(log, follow):
    follower = follow(log, at_end=True)
    assert _texts(follower) == []
    _write(log, "a\n")
    assert _texts(follower) == ["a"]


def test_what_is_there_can_be_left_out(log, follow):
    _write(log, "old\npart")
    follower = follow(log, at_end=True)
    _write(log, "ly new\nnew\n")
    assert _texts(follower) == ["partly new", "new"]


def test_a_renamed_file_is_read_to_its_end_before_the_next(log, follow):
    follower = follow(log, linger_s=0.2)
    _write(log, "a\n")
    with log.open("a") as old:
        assert _texts(follower) == ["a"]
        log.rename(log.with_name("feed.log.1"))
        _write(log, "c\n")
        assert _texts(follower) == []  # it waits for who may still write to the old one
        old.write("b\nb2")
        old.flush()
        assert _texts(follower) == ["b"]
    found = []
    grpc_service.wait_until(lambda: found.extend(_texts(follower)) or "c" in found)
    assert found == ["b2", "c"]
    _write(log, "d\n")
    assert _texts(follower) == ["d"]


def test_files_that_had_the_name_in_between_are_read_as_well(log, follow):
    _write(log, "a\n")
    follower = follow(log, linger_s=0)
    position = follower.poll()[0].position
    for n in (1, 2, 3):
        log.rename(log.with_name(f"feed.log.{4 - n}"))
        _write(log, f"{n}\n")
        follower.look()
    assert _texts(follower) == ["1", "2", "3"]
    _write(log.with_name("feed.log.bak"), "a copy\n")
    assert _texts(follow(log, position=position, linger_s=0)) == ["1", "2", "3"]


@pytest.mark.parametrize("again", ["", "x\n", "completely other rows, more than there were\n" * 9])
def test_a_truncated_file_is_read_from_its_beginning(log, follow, again):
    _write(log, "a\nb\nleft")
    follower = follow(log)
    assert _texts(follower) == ["a", "b"]
    _write(log, again, "w")
    assert _texts(follower) == ["left", *again.splitlines()]
    _write(log, "y\n")
    assert _texts(follower) == ["y"]


def test_long_files_and_long_lines_come_in_parts(log, follow, monkeypatch):
    monkeypatch.setattr("jaxstate.serving.tail_file._READ_BYTES", 16)
    rows = [f"{n}" * (n % 40 + 1) for n in range(60)]
    _write(log, "".join(f"{row}\n" for row in rows))
    follower = follow(log)
    assert len(follower.poll()) < 60
    assert _texts(follow(log)) == rows
    assert _texts(follow(log, at_end=True)) == []


def test_reading_goes_on_where_it_was_also_in_a_renamed_file(log, follow):
    _write(log, "a\nb\n")
    follower = follow(log)
    position = follower.poll()[0].position
    log.rename(log.with_name("feed.log.1"))
    _write(log, "c\n")
    resumed = follow(log, position=position, linger_s=0)
    assert _texts(resumed) == ["b", "c"]


def test_what_is_gone_is_said(log, follow, caplog):
    _write(log, "a\nb\n")
    position = follow(log).poll()[-1].position
    _write(log, "c\n", "w")
    assert _texts(follow(log, position=position)) == ["c"]
    assert "lines may have been missed" in caplog.text


ROWS = [f"2026-11-30,{n:04}" for n in range(60)]  # 900 bytes: more than both ends of a mark


@pytest.mark.parametrize(
    "anew",
    [
        [f"other,{n}" for n in range(200)],
        ["2025-11-30,0000", *ROWS[1:], "more"],  # differs in the first bytes only
        [*ROWS[:59], "2026-11-30,9999", "more"],  # in the last ones before the position
        ["short"],
    ],
)
@pytest.mark.parametrize("how", ["truncated", "made anew"])
def test_what_was_written_anew_meanwhile_is_read_from_its_first_line(
    log, follow, caplog, anew, how
):
    _write(log, "".join(f"{row}\n" for row in ROWS))
    position = follow(log).poll()[-1].position
    assert _texts(follow(log, position=position)) == [] and not caplog.text
    if how == "made anew":
        log.unlink()
    _write(log, "".join(f"{row}\n" for row in anew), "w")
    # Many file systems give a new file the inode that has become free; here it always has it.
    position = dataclasses.replace(position, inode=log.stat().st_ino)
    assert _texts(follow(log, position=position)) == anew
    assert "lines may have been missed" in caplog.text


@pytest.mark.parametrize("parts", [[1, 2, 3, 5, 1, 20], [9, 300, 9, 300, 2000], [256, 256, 1]])
def test_a_place_is_the_same_however_the_file_was_read(log, follow, parts):
    as_it_grew = follow(log)
    grown = []
    for n, size in enumerate(parts * 2):
        _write(log, f"{n}" * size + "\n" * (n % 2))
        grown += as_it_grew.poll()
    assert grown == follow(log).poll()
    for before, line in zip(grown, grown[1:], strict=False):
        assert before.position == line.begin
        assert follow(log, position=line.begin).poll()[0] == line


# Into a session


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return grpc_service.load(tmp_path_factory.mktemp("tail"))


@pytest.fixture(scope="module")
def running(model):
    with grpc_service.serving(grpc_service.engine_of(model), model.tokenizer) as running:
        yield running


@dataclasses.dataclass
class Tail:
    """A tail in a thread."""

    running: grpc_service.Running
    options: TailOptions
    port: int
    out: io.StringIO = dataclasses.field(default_factory=io.StringIO)
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: BaseException | None = None

    def __enter__(self):
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(grpc_service.WAIT_S)

    def _run(self):
        log = Console(file=io.StringIO())
        try:
            with Client(f"127.0.0.1:{self.port}") as client:
                tail_command.run(
                    self.options, client, as_json=True, out=Console(file=self.out), log=log,
                    stop=self.stop,
                )  # fmt: skip
        except (JaxStateError, OSError) as error:
            self.error = error

    @property
    def session(self):
        names = self.running.service._engine.session_ids
        return self.running.service._engine.session(names[0]) if names else None

    def wait_for(self, text):
        def is_there():
            assert self.error is None, self.error
            return self.session and self.text == text

        try:
            grpc_service.wait_until(is_there)
        except AssertionError:
            raise AssertionError(f"expected {text!r}, got {self.text!r}") from self.error

    @property
    def text(self):
        return self.running.service.text(list(self.session.token_ids))

    @property
    def answers(self):
        return [json.loads(line) for line in self.out.getvalue().splitlines()]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(tail_command, "_LOOK_S", 0.05)
    monkeypatch.setattr(Follower.__init__, "__kwdefaults__", {
        "at_end": False, "position": None, "linger_s": 0.2,
    })  # fmt: skip


def _tail(running, path, port=None, **options):
    given = TailOptions(file=path, asks=(ASK,), max_new_tokens=2, **options)
    return Tail(running, given, port or running.port)


def test_rows_go_into_a_session_whose_question_stays_answered(running, tmp_path):
    path = tmp_path / "feed.csv"
    _write(path, "t,px\n1,10\n2,11\n")
    with _tail(running, path) as tail:
        tail.wait_for("t,px\n1,10\n2,11\n")
        assert tail.session.frozen_len == len("t,px\n") and tail.session.version == 1  # one append
        _write(path, "3,12\n\n4,1")
        tail.wait_for("t,px\n1,10\n2,11\n3,12\n")
        _write(path, "3\n")
        tail.wait_for("t,px\n1,10\n2,11\n3,12\n4,13\n")
        with Client(f"127.0.0.1:{running.port}") as client:
            session = client.session(tail.session.session_id)
            expected = session.query(ASK, max_new_tokens=2, stale="wait").result()
        grpc_service.wait_until(lambda: tail.answers and tail.answers[-1]["version"] == 3)
        last = tail.answers[-1]
        assert (last["ask"], last["text"], last["age"]) == (ASK, expected.text, 0)
        assert last["source"] in ("computed", "resumed") and not last["missed"]
    assert running.service._engine.session_ids == []  # it ended with its command


def test_no_row_is_lost_or_doubled_over_rotation_and_truncation(running, tmp_path):
    path = tmp_path / "feed.csv"
    expected = ["t\n"]
    _write(path, "t\n")

    def write(rows):
        expected.extend(rows)
        _write(path, "".join(rows))

    with _tail(running, path) as tail:
        tail.wait_for("t\n")
        for n in range(3):
            write([f"{n}a\n", f"{n}b\n"])
            path.rename(tmp_path / f"feed.csv.{n}")
            _write(path, "t\n")  # as the first had it
            write([f"{n}c\n"])
            tail.wait_for("".join(expected))
        _write(path, "t\n", "w")
        write(["x\n", "y\n"])
        tail.wait_for("".join(expected))
    assert tail.error is None


def test_it_begins_at_the_end_if_it_is_told_to(running, tmp_path):
    path = tmp_path / "feed.csv"
    _write(path, "t\nold\n")
    with _tail(running, path, start="end") as tail:
        tail.wait_for("t\n")
        _write(path, "new\n")
        tail.wait_for("t\nnew\n")


def test_a_file_that_is_not_there_yet_is_waited_for(running, tmp_path):
    path = tmp_path / "later.jsonl"
    with _tail(running, path) as tail:
        grpc_service.wait_until(lambda: tail.session)
        _write(path, '{"px": 1}\n')
        tail.wait_for('{"px": 1}\n')


def test_many_rows_are_split_so_that_they_fit_the_window(running, tmp_path):
    path = tmp_path / "feed.log"
    _write(path, "".join(f"{n:03}\n" for n in range(200)))
    with _tail(running, path) as tail:
        grpc_service.wait_until(lambda: tail.session)
        grpc_service.wait_until(lambda: tail.error or tail.text.endswith("199\n"))
        kept = tail.text
        assert kept in "".join(f"{n:03}\n" for n in range(200)) and len(kept) > 80
        assert tail.session.version == 17  # of 12 rows, which are half a window


def test_a_lost_acknowledgement_and_a_longer_outage_double_nothing(running, tmp_path):
    path, position = tmp_path / "feed.log", tmp_path / "position"
    how = {"session": "cut", "position": position}
    _write(path, "a\n")
    with cut_proxy.before(running.port) as proxy, _tail(running, path, proxy.port, **how) as tail:
        tail.wait_for("a\n")  # and has been told so
        grpc_service.wait_until(lambda: json.loads(position.read_text())["position"]["offset"] == 2)
        proxy.hold_answers()
        _write(path, "b\n")
        tail.wait_for("a\nb\n")
        proxy.cut()
        _write(path, "c\n")
        tail.wait_for("a\nb\nc\n")
    running.service.close_session("cut")


def test_a_remembered_position_is_gone_on_from(running, tmp_path):
    path, position = tmp_path / "feed.csv", tmp_path / "position"
    how = {"session": "kept", "position": position}
    _write(path, "t\na\n")
    with _tail(running, path, **how) as tail:
        tail.wait_for("t\na\n")
        grpc_service.wait_until(lambda: json.loads(position.read_text())["position"]["offset"] == 4)
    _write(path, "b\n")
    with _tail(running, path, **how) as tail:
        tail.wait_for("t\na\nb\n")
    found = Progress.load(position, "kept")
    # Killed behind an append that nobody told of: what was sent is sent again under its number.
    with contextlib.closing(Follower(path)) as follower:
        last = follower.poll()[-1]
    assert last.position == found.position == found.end
    dataclasses.replace(found, position=last.begin).save(position)
    _write(path, "c\n")
    with _tail(running, path, **how) as tail:
        tail.wait_for("t\na\nb\nc\n")
        grpc_service.wait_until(lambda: json.loads(position.read_text())["position"]["offset"] == 8)
    # Killed before it was sent: there was no such number yet.
    _write(path, "d\n")
    found = Progress.load(position, "kept")
    with contextlib.closing(Follower(path)) as follower:
        end = follower.poll()[-1].position
    dataclasses.replace(found, sequence=found.sequence + 1, end=end).save(position)
    with _tail(running, path, **how) as tail:
        tail.wait_for("t\na\nb\nc\nd\n")
    with pytest.raises(InputError, match="of session kept; choose another file"):
        Progress.load(position, "other")
    running.service.close_session("kept")


@pytest.mark.parametrize(
    "offset, anew, expected",
    [
        (3, None, "a\nb\nc\n"),  # "b" is the end of a file that was renamed, without newline
        (2, None, "a\nb\nc\n"),
        (2, "x\ny\n", "a\nx\ny\nc\n"),  # not what was sent: rows of their own
    ],
)
def test_killed_between_append_and_note_it_doubles_and_loses_nothing(
    running, tmp_path, monkeypatch, offset, anew, expected
):
    path, old = tmp_path / "feed.log", tmp_path / "feed.log.1"
    how = {"session": "killed", "position": tmp_path / "position"}
    _write(path, "a\nb")
    save = Progress.save

    def save_or_die(progress, to):
        if progress.position.offset == offset:  # it would say that the append has been made
            raise JaxStateError("killed")
        save(progress, to)

    monkeypatch.setattr(Progress, "save", save_or_die)
    with _tail(running, path, **how) as tail:
        if offset == 3:
            tail.wait_for("a\n")
        else:
            tail.thread.join(grpc_service.WAIT_S)
        path.rename(old)
        _write(path, "c\n")
        tail.thread.join(grpc_service.WAIT_S)
        assert str(tail.error) == "killed"
        assert tail.text == "a\nb\n"[: 2 * offset - 2]
    monkeypatch.setattr(Progress, "save", save)
    if anew is not None:
        _write(old, anew, "w")
    with _tail(running, path, **how) as tail:
        tail.wait_for(expected)
    running.service.close_session("killed")


def test_a_session_that_is_closed_by_others_ends_it(running, tmp_path):
    path = tmp_path / "feed.log"
    _write(path, "a\n")
    with _tail(running, path) as tail:
        tail.wait_for("a\n")
        running.service.close_session(tail.session.session_id)
        tail.thread.join(grpc_service.WAIT_S)
    assert isinstance(tail.error, UnknownSessionError)


def test_a_file_that_cannot_be_looked_at_any_more_ends_it(running, tmp_path):
    path = tmp_path / "feed.log"
    _write(path, "a\n")
    with _tail(running, path) as tail:
        tail.wait_for("a\n")
        path.unlink()
        path.mkdir()
        tail.thread.join(grpc_service.WAIT_S)
    assert isinstance(tail.error, IsADirectoryError)
    assert running.service._engine.session_ids == []


@pytest.mark.parametrize("header", [False, True])
def test_a_watch_of_the_directory_that_breaks_ends_it(running, tmp_path, monkeypatch, header):
    def watch(*_, **how):
        yield set()
        raise OSError("no watches left")

    path = tmp_path / ("feed.csv" if header else "feed.log")
    monkeypatch.setattr(tail_command.watchfiles, "watch", watch)
    with _tail(running, path) as tail:
        tail.thread.join(grpc_service.WAIT_S)
    assert "no watches left" in str(tail.error)


def test_an_output_that_is_gone_ends_it(running, tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("nobody reads")

    path = tmp_path / "feed.log"
    _write(path, "a\n")
    tail = _tail(running, path)
    tail.out = Gone()
    with tail:
        tail.thread.join(grpc_service.WAIT_S)
    assert not tail.thread.is_alive() and running.service._engine.session_ids == []


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(asks=()), "ask: expected at least one question"),
        (dict(start="middle"), "from: expected one of"),
        (dict(format="xml"), "format: expected one of"),
        (dict(position=pathlib.Path("p")), "position: expected --session"),
        (dict(file=pathlib.Path("/no/such/f.csv")), "file: expected a directory with f.csv"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(tmp_path, wrong, message):
    given = dict(file=tmp_path / "f.csv", asks=("a",)) | wrong
    with pytest.raises(InputError, match=message):
        TailOptions(**given)


def test_a_terminal_shows_questions_answers_and_how_old_they_are(running):
    with Client(f"127.0.0.1:{running.port}") as client, client.create("abc") as session:
        flash_id = session.register(ASK, max_new_tokens=2).flash_id
        fresh = next(iter(session.watch()))
    assert fresh.flash_id == flash_id
    answer = dataclasses.replace(fresh.answer, text=" yes [b]!")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    view = tail_view.view_of(console, [ASK, "down?"], as_json=False)
    assert isinstance(view, tail_view.Board)
    with view:
        view.note_rows(1200, 3)
        view.note_answer(ASK, FreshAnswer(cursor="", flash_id=flash_id, answer=answer))
    shown = out.getvalue()
    assert "yes [b]!" in shown and "3 versions" in shown and "down?" in shown
    assert "1,200 rows appended, version 3" in shown
    plain = io.StringIO()
    lines = tail_view.view_of(Console(file=plain, width=40), [ASK], as_json=False)
    lines.note_answer(ASK, dataclasses.replace(fresh, answer=answer))
    assert plain.getvalue() == "version 0: up? yes [b]! (computed, age 0)\n"


@pytest.mark.parametrize("sent, status", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_it_and_closes_its_session(running, tmp_path, sent, status):
    path = tmp_path / "feed.csv"
    _write(path, "t\na\n")
    command = [sys.executable, "-c", PROGRAM, "tail", path, "--ask", ASK, "--json"]
    environment = os.environ | {"JAXSTATE_SERVER": f"127.0.0.1:{running.port}"}
    with subprocess.Popen(
        list(map(str, command)), env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        with contextlib.ExitStack() as killed:
            killed.callback(process.kill)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["ask"] == ASK
            process.send_signal(sent)
            _, err = process.communicate(timeout=grpc_service.WAIT_S)
            killed.pop_all()
    assert process.returncode == status, err
    said = err.splitlines()[-1] == "jaxstate: interrupted"
    assert said == (sent == signal.SIGINT) and "Traceback" not in err
    assert running.service._engine.session_ids == []
