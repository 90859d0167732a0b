"""Whether the disk has the journal before a caller is told, by the system calls of a server."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import re
import shutil
import time

from recovery_writers import Writer
from served import serving

SIZES = ("--max-model-len", 512, "--kv-cells", 2048)
_BEGUN = re.compile(r"^(?P<pid>\d+) .* f(?:data)?sync\(\d+<(?P<path>[^>]*)> *<unfinished")
_RESUMED = re.compile(
    r"^(?P<pid>\d+) +(?P<at>\d+\.\d+) <\.\.\. f(?:data)?sync resumed>.*= 0 <\d+\.\d+>"
)
_WHOLE = re.compile(
    r"^\d+ +(?P<at>\d+\.\d+) f(?:data)?sync\(\d+<(?P<path>[^>]*)>\) += 0 <(?P<took>\d+\.\d+)>"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """Appends one after the other: of how many the journal was synchronised in between."""

    appends: int
    synchronised: int
    syncs: int


def find_strace() -> str | None:
    """Return what traces system calls, if it is there."""
    return shutil.which("strace")


def trace(
    model: object, vocab_size: int, directory: pathlib.Path, durability: str, appends: int
) -> Traced:
    """Append under a trace: from sending to being told, has a sync of the journal ended?"""
    state, calls = directory / f"state-{durability}", directory / f"calls-{durability}"
    strace = (
        find_strace(), "-f", "-ttt", "-T", "-y", "-e", "trace=fsync,fdatasync", "-o", calls,
    )  # fmt: skip
    arguments = (*SIZES, "--state-dir", state, "--durability", durability)
    rng = random.Random(0)
    writer = Writer(session="s", prefix=[1, 2, 3], vocab_size=vocab_size)
    told: list[tuple[float, float]] = []
    with serving(model, *arguments, log=directory / "log", trace=strace) as server:
        writer.open(server.stub)
        for _ in range(appends):
            writer.pending = writer.append(writer.draw(rng, 2))
            began = time.time()
            writer.send(server.stub)
            told.append((began, time.time()))
    ends = [at for at, path in _syncs(calls) if str(state) in path and "journal" in path]
    hit = sum(any(began <= at <= end for at in ends) for began, end in told)
    return Traced(appends=appends, synchronised=hit, syncs=len(ends))


def _syncs(calls: pathlib.Path) -> list[tuple[float, str]]:
    """When each sync has ended, seconds since 1970, and of which file."""
    found: list[tuple[float, str]] = []
    begun: dict[str, str] = {}
    for line in calls.read_text().splitlines():
        if whole := _WHOLE.match(line):
            found.append((float(whole["at"]) + float(whole["took"]), whole["path"]))
        elif part := _BEGUN.match(line):
            begun[part["pid"]] = part["path"]
        elif (rest := _RESUMED.match(line)) and rest["pid"] in begun:
            found.append((float(rest["at"]), begun.pop(rest["pid"])))
    return found
