"""The market workload's arms: who is asked, in what order, and what each answer cost."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
from common import Report
from peers.client import ENGINES, Asked, Peer

from jaxstate.engine import Engine
from jaxstate.serving import market

THREADS = 2
REPEATS = 3
SLOPE_REPEATS = 11
SETTLE_S = 0.01  # lets another engine's threads stop spinning


class OurSession:
    """A session of our engine that answers like a Peer."""

    def __init__(self, engine: Engine, start: Sequence[int]):
        """Open a session that begins with `start`."""
        self._engine = engine
        self.session_id = engine.create(start)
        self.append_ms: list[float] = []

    def append(self, ids: Sequence[int]) -> None:
        """Append and keep the time it took."""
        self.append_ms.append(
            common.milliseconds(lambda: self._engine.append(self.session_id, ids))
        )

    def ask(self, ids: Sequence[int], max_new_tokens: int) -> Asked:
        """Ask about the session, which stays as it is."""
        return _timed(
            lambda: self._engine.stream(self.session_id, ids, max_new_tokens=max_new_tokens)
        )

    def ask_nobody(self, ids: Sequence[int], max_new_tokens: int) -> Asked:
        """Forward everything anew, without a session."""
        return _timed(
            lambda: self._engine.stream_generate(ids, max_new_tokens=max_new_tokens)
        )


def _timed(start: Callable[[], Any]) -> Asked:
    """Time a stream of tokens up to its first one and to its end."""
    began = time.perf_counter()
    stream = start()
    next(stream)
    first_ms = (time.perf_counter() - began) * 1e3
    try:
        while True:
            next(stream)
    except StopIteration as end:
        answer = end.value
    return Asked(
        first_token_ms=first_ms, total_ms=(time.perf_counter() - began) * 1e3,
        answer_ids=list(answer.token_ids), tokens_forwarded=answer.tokens_forwarded,
    )


@dataclasses.dataclass(kw_only=True)
class Arm:
    """One way to get the answer; `samples` holds every round's repetitions.

    Attributes:
      name: as in the JSON lines.
      prepare: called before each repetition, outside its time, with the new tokens the first time.
      ask: answers the question.
      repeats: times a question is asked per round; all but the first see a cache put back to
        what it was before the question.
      error: why the arm stopped, if it did.
    """

    name: str
    prepare: Callable[[list[int]], None]
    ask: Callable[[list[int], int], Asked]
    repeats: int
    samples: list[list[Asked]] = dataclasses.field(default_factory=list)
    error: str | None = None

    def first_ms(self, round_idx: int) -> float:
        """Return a round's median time to the first token."""
        return common.median(asked.first_token_ms for asked in self.samples[round_idx])

    def total_ms(self, round_idx: int) -> float:
        """Return a round's median time to the last token."""
        return common.median(asked.total_ms for asked in self.samples[round_idx])

    def first_p50(self) -> float:
        """Return the median over rounds of first_ms."""
        return common.median(map(self.first_ms, range(len(self.samples))))

    def total_p50(self) -> float:
        """Return the median over rounds of total_ms."""
        return common.median(map(self.total_ms, range(len(self.samples))))


def peer_arms(peers: dict[str, Peer]) -> list[Arm]:
    """Build the arms of the workers; each has a prefix cache of its own."""
    return [_peer_arm(name, peer) for name, peer in peers.items()]


def _peer_arm(name: str, peer: Peer) -> Arm:
    warm = name.endswith(".warm")

    def prepare(new: list[int]) -> None:
        if new:
            peer.append(new)
        if warm:
            peer.warm()

    return Arm(name=name, prepare=prepare, ask=peer.ask, repeats=REPEATS if warm else 1)


def start_peers(directory: pathlib.Path, report: Report) -> dict[str, Peer]:
    """Start a worker per engine and arm; one that fails is reported and left out."""
    peers = {}
    for engine, arm in itertools.product(ENGINES, ("warm", "cold")):
        name = f"{engine}.{arm}"
        common.note(f"starting {name}")
        try:
            peers[name] = Peer(directory, engine, threads=THREADS)
        except RuntimeError as error:
            report.line(arm=name, error=str(error))
            common.note(str(error))
            continue
        report.line(arm=name, version=peers[name].version, threads=THREADS)
    return peers


@dataclasses.dataclass(kw_only=True)
class Run:
    """What one run of the workload needs and found.

    Attributes:
      context: tokens in the context after each round.
      slope_ms: for each question length, our time to the first token in each round.
      none_ms: time to the first token without any reuse, by arm.
      load: what other processes take away meanwhile.
    """

    engine: Engine
    workload: market.Workload
    session: OurSession
    peers: dict[str, Peer]
    arms: list[Arm]
    report: Report
    load: common.OtherLoad
    context: list[int] = dataclasses.field(default_factory=list)
    slope_ms: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    none_ms: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ours(self) -> Arm:
        """Our arm."""
        return self.arms[0]

    def living(self, suffix: str) -> list[Arm]:
        """Return the peers' arms of a kind that went through all rounds."""
        return [arm for arm in self.arms if arm.name.endswith(suffix) and not arm.error]

    def peer(self, name: str) -> Peer | None:
        """Return a worker that still answers."""
        living = {arm.name for arm in self.arms if not arm.error}
        return self.peers[name] if name in self.peers and name in living else None


def run_round(run: Run, round_idx: int) -> None:
    """Append, then ask every arm in turn; the order changes with each round and repetition."""
    new = list(run.workload.rounds[round_idx])
    question = list(run.workload.questions[market.question_idx(round_idx)])
    run.load.end("between rounds")
    run.context.append(run.engine.session(run.session.session_id).context_len + len(new))
    for arm in run.arms:
        arm.samples.append([])
    for repeat in range(REPEATS):
        for arm in _order(run.arms, round_idx + repeat):
            if arm.error or repeat >= arm.repeats:
                continue
            try:
                arm.prepare(new if repeat == 0 else [])
                time.sleep(SETTLE_S)
                arm.samples[-1].append(arm.ask(question, market.MAX_NEW_TOKENS))
            except RuntimeError as error:
                arm.error = str(error)
                run.report.line(arm=arm.name, round=round_idx + 1, error=arm.error)
    report_round(run, round_idx, new, question)


def _order(arms: list[Arm], turn: int) -> list[Arm]:
    """Rotate the arms, and turn their order round every other time."""
    at = turn % len(arms)
    rotated = arms[at:] + arms[:at]
    return rotated[::-1] if turn % 2 else rotated


def report_round(run: Run, round_idx: int, new: list[int], question: list[int]) -> None:
    """Write a line per arm."""
    common_fields = {"round": round_idx + 1, "context": run.context[-1]}
    other_s = run.load.end(f"round {round_idx + 1}")
    run.report.line(
        arm="append", **common_fields, first_token_ms=None,
        total_ms=run.session.append_ms[-1], answer_ids=[], tokens_forwarded=len(new),
        other_cpu_s=other_s,
    )
    shown = []
    for arm in run.arms:
        samples = arm.samples[-1]
        if not samples:
            continue
        run.report.line(
            arm=arm.name, **common_fields, first_token_ms=arm.first_ms(-1),
            total_ms=arm.total_ms(-1), answer_ids=samples[0].answer_ids,
            tokens_forwarded=samples[0].tokens_forwarded, question_tokens=len(question),
            first_token_samples_ms=[asked.first_token_ms for asked in samples],
            total_samples_ms=[asked.total_ms for asked in samples],
        )
        shown.append(f"{arm.name} {arm.first_ms(-1):.0f}/{arm.total_ms(-1):.0f}")
    common.note(
        f"round {round_idx + 1}: context {run.context[-1]}, append "
        f"{run.session.append_ms[-1]:.0f} ms; first/last token ms: {', '.join(shown)}"
        + (f"; others took {other_s:.1f} s of processor time" if other_s > 0.5 else "")
    )


def ask_for_slope(run: Run, round_idx: int) -> None:
    """Time every question's first token at this context, so that lengths do not mix."""
    found: dict[tuple[int, ...], list[float]] = {}
    for _ in range(SLOPE_REPEATS):  # in turn, so that a short disturbance meets all of them
        for question in run.workload.questions:
            found.setdefault(question, []).append(run.session.ask(question, 1).first_token_ms)
    run.load.end(f"slope, round {round_idx + 1}")
    for question, samples in found.items():
        run.slope_ms.setdefault(len(question), []).append(common.median(samples))
        run.report.line(
            arm="computed.slope", round=round_idx + 1, context=run.context[-1],
            question_tokens=len(question), **common.spread("first_token", samples),
        )


def ask_without_reuse(run: Run, round_idx: int) -> None:
    """Ask the last question of engines that hold nothing."""
    question = list(run.workload.questions[market.question_idx(round_idx)])
    prompt = run.workload.context(round_idx + 1) + question
    asks = {"no_reuse": lambda: run.session.ask_nobody(prompt, market.MAX_NEW_TOKENS)}
    for engine in ENGINES:
        if peer := run.peer(f"{engine}.cold"):
            asks[f"{engine}.no_reuse"] = lambda peer=peer: peer.ask(
                question, market.MAX_NEW_TOKENS, reuse=False
            )
    run.load.end("between rounds")
    for name, ask in asks.items():
        common.note(f"asking without reuse: {name}")
        asked = ask()
        run.none_ms[name] = asked.first_token_ms
        run.report.line(
            arm=name, round=round_idx + 1, context=run.context[-1], **dataclasses.asdict(asked)
        )
    run.load.end("no reuse")
