"""What a server makes of a full disk, of short writes and of flipped bits: never a wrong answer."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import grpc
from recovery_writers import PREFIX, Losses, Writer, check, compare
from served import CALL_S, Server, serving

from jaxstate.engine import Engine
from jaxstate.serving import jaxstate_pb2 as pb

SIZES = ("--max-model-len", 512, "--kv-cells", 2048)
SMALL_DISK, SMALL_FILE = "400k", 200_000  # bytes
MOST_WRITES = 4000


@dataclasses.dataclass(kw_only=True)
class Faults:
    """What came of it.

    Attributes:
      losses: what was wrong; nothing may be.
      outcomes: how often what happened, by fault.
      not_run: why a fault could not be made.
    """

    losses: Losses = dataclasses.field(default_factory=Losses)
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    not_run: list[str] = dataclasses.field(default_factory=list)


class FaultRun:
    """All faults on servers of one model."""

    def __init__(
        self, model: object, vocab_size: int, engine: Engine, directory: pathlib.Path, seed: int
    ):
        """Work in a directory."""
        self.found = Faults()
        self._model = model
        self._vocab_size = vocab_size
        self._engine = engine
        self._directory = directory
        self._log = directory / "log"
        self._rng = random.Random(seed)

    def full_disk(self) -> None:
        """Write to a disk until it is full, give it room, and start again."""
        disk = self._directory / "disk"
        disk.mkdir()
        try:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(disk)],
                check=True, capture_output=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            self.found.not_run.append(f"full disk: no small disk can be mounted here ({error})")
            return
        try:
            self._until_it_ends("disk full", disk / "state", [])
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            self._again("disk full", disk / "state")
        finally:
            subprocess.run(["umount", str(disk)], check=False)

    def short_write(self) -> None:
        """Have a file's last write end in the middle, and start again without the limit."""
        state = self._directory / "short"
        prlimit = shutil.which("prlimit")
        if prlimit is None:
            self.found.not_run.append("short write: prlimit is not there")
            return
        self._until_it_ends("short write", state, [prlimit, f"--fsize={SMALL_FILE}"])
        self._again("short write", state)

    def flipped_bits(self, journals: int, snapshots: int) -> None:
        """Flip one bit at a time in what a killed server and one that was drained have left."""
        for kind, count, is_drained in (
            ("bit in a journal", journals, False),
            ("bit in an automatic snapshot", snapshots, True),
        ):
            state = self._directory / f"whole-{is_drained}"
            self._writer = self._new_writer()
            with self._started(state) as server:
                self._writer.open(server.stub)
                self._write(server, 60)
                server.stop() if is_drained else server.kill()
            for _ in range(count):
                damaged = self._directory / "damaged"
                shutil.copytree(state, damaged)
                self._flip(damaged / "snapshots" if is_drained else damaged)
                self._again(kind, damaged, one_of_many=True)
                shutil.rmtree(damaged)

    def flipped_bits_in_saved(self, count: int) -> None:
        """Flip one bit at a time in what a client has saved by name."""
        state = self._directory / "saved"
        self._writer = self._new_writer()
        with self._started(state) as server:
            self._writer.open(server.stub)
            self._write(server, 20)
            request = pb.SnapshotRequest(session_id=self._writer.session, name="whole")
            server.stub.Snapshot(request, timeout=CALL_S)
            whole = next((state / "saved").rglob("whole"))
            for number in range(count):
                shutil.copytree(whole, whole.with_name(name := f"damaged-{number}"))
                self._flip(whole.with_name(name))
                try:
                    server.stub.Restore(pb.RestoreRequest(name=name), timeout=CALL_S)
                    outcome = "restored"
                except grpc.RpcError as error:
                    outcome = error.code().name
                    self.found.losses.corrupt += outcome != "DATA_LOSS"
                self.found.outcomes[f"bit in a saved snapshot: {outcome}"] += 1
                if outcome == "restored":  # the bit meant nothing; its version has gone on
                    self._writer.version += 1
                check(self._writer, server.stub, self.found.losses)
                compare(self._writer, server.stub, self._engine, self._rng, self.found.losses)
            server.stop()

    @contextlib.contextmanager
    def _started(self, state: pathlib.Path, trace: Sequence[str] = ()) -> Iterator[Server]:
        arguments = (*SIZES, "--state-dir", state)
        with serving(self._model, *arguments, log=self._log, trace=trace) as server:
            yield server

    def _new_writer(self) -> Writer:
        prefix = [self._rng.randrange(self._vocab_size) for _ in range(PREFIX)]
        return Writer(session="s", prefix=prefix, vocab_size=self._vocab_size)

    def _write(self, server: Server, count: int) -> None:
        for _ in range(count):
            self._writer.pending = self._writer.next(self._rng)
            self._writer.send(server.stub)

    def _until_it_ends(self, fault: str, state: pathlib.Path, trace: Sequence[str]) -> None:
        """Write until a server refuses, and let it end."""
        self._writer = self._new_writer()
        with self._started(state, trace) as server:
            self._writer.open(server.stub)
            try:
                self._write(server, MOST_WRITES)
            except grpc.RpcError as error:
                outcome = error.code().name
                self.found.losses.corrupt += outcome not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
            else:
                raise RuntimeError(f"{fault}: {MOST_WRITES} verbs were written all the same")
            self.found.outcomes[f"{fault}: {outcome}"] += 1

    def _again(self, fault: str, state: pathlib.Path, *, one_of_many: bool = False) -> None:
        """Start a server on what is there: it says that it is damaged, or has all of it."""
        writer = dataclasses.replace(self._writer) if one_of_many else self._writer
        try:
            with self._started(state) as server:
                check(writer, server.stub, self.found.losses)
                compare(writer, server.stub, self._engine, self._rng, self.found.losses)
                server.kill()
            outcome = "all there again"
        except RuntimeError as error:
            is_said = any(word in str(error) for word in ("damaged", "acknowledged", "expected"))
            self.found.losses.corrupt += not is_said
            outcome = "refused at the start"
        self.found.outcomes[f"{fault}: {outcome}"] += 1

    def _flip(self, directory: pathlib.Path) -> None:
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        sizes = [path.stat().st_size for path in files]
        path = self._rng.choices(files, sizes)[0]
        data = bytearray(path.read_bytes())
        bit = self._rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
