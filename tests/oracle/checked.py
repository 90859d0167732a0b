"""An engine whose every verb is compared with the history-true reference.

After each verb, refused ones included:

- what it answered equals the reference, by the rule of equality, and what it claims of itself
  (source, version, tokens forwarded, finish reason) is so;
- every session's table covers positions 0 ... len - 1 once each, and the bits of its cells are
  those that were there when their tokens were computed, rotated where the table says;
- no cell that anybody saw was written, and no page but a free one or one of the verb's session;
- pages, references and high-water marks agree with the tables, and nothing else is held;
- a refused verb changed nothing.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence

from jaxstate import session as session_module
from jaxstate.answer import Answer
from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, InputError, SessionError
from oracle.answers import Answers
from oracle.equality import Rule, require
from oracle.history import Context, History
from oracle.mirror import Mirror, Refusal, common_len
from oracle.tiny import Setup, params_of
from oracle.together import RowSpec, Together
from oracle.watch import REFUSED, Watch


class CheckedEngine:
    """The engine's verbs, each with its comparison; raises Mismatch where they disagree."""

    def __init__(self, engine: Engine, setup: Setup):
        """Check an engine that has no sessions yet."""
        self.engine = engine
        self.history = History(params_of(setup), setup.model)
        self.rule = Rule()
        self.mirrors: dict[str, Mirror] = {}
        self._sizes = setup.sizes
        self._max_positions = setup.model.max_positions
        self._watch = Watch(engine, self.history, self.rule, self.mirrors)
        self._answers = Answers(self.history, self.rule)

    @property
    def is_sound(self) -> bool:
        """No verb has failed so far."""
        return self._watch.is_sound

    # Sessions

    def create(self, frozen: Sequence[int], when_full: str) -> str | None:
        """Create a session; None if it was refused."""
        too_long = len(frozen) >= self._sizes.context_len
        name = self._watch.attempt(
            "create", lambda: self.engine.create(frozen, when_full=when_full),
            refusal=CapacityError if too_long else None, tokens=len(frozen),
            forwards=lambda _: len(frozen),
        )  # fmt: skip
        if name is not REFUSED:
            self.mirrors[name] = Mirror(
                context=self.history.extend((), frozen), frozen_len=len(frozen),
                when_full=when_full,
            )  # fmt: skip
        self._watch.check("create")
        return None if name is REFUSED else name

    def fork(self, session_id: str) -> str:
        """Fork a session."""
        name = self._watch.attempt(
            "fork", lambda: self.engine.fork(session_id), forwards=lambda _: 0
        )
        self.mirrors[name] = dataclasses.replace(self.mirrors[session_id], paid=[])
        self._watch.check("fork")
        return name

    def close(self, session_id: str) -> None:
        """Close a session; it is unknown from then on."""
        self._watch.attempt("close", lambda: self.engine.close(session_id))
        del self.mirrors[session_id]
        self._watch.attempt(
            "closed session", lambda: self.engine.session(session_id), refusal=SessionError
        )
        self._watch.check("close")

    def close_all(self) -> None:
        """Close every session; nothing may be held then."""
        for session_id in list(self.mirrors):
            self.close(session_id)
        held = self.engine.cells_held
        require(held == 0, f"all sessions are closed and {held} cells are still held")

    def repack(self, session_id: str) -> None:
        """Move a session's cells together; nothing changes but where they are."""
        before = self.engine.cells_held
        session = self.engine.session(session_id)
        gain = self._watch.attempt(
            "repack", lambda: self.engine.verbs.tiers.repack(session), forwards=lambda _: 0
        )
        freed = before - self.engine.cells_held
        require(freed == gain * self._sizes.page_size, f"repack: freed {freed} cells")
        if gain:
            self._count("repacked")
            require(not self.engine.verbs.tiers.repack(session), "repack: gained again")
        self._watch.check("repack")

    # Durable verbs

    def append(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Append, refused where it does not fit."""
        mirror = self.mirrors[session_id]
        refusal, dropped = mirror.overflow(len(token_ids), self._sizes)
        version = self._watch.attempt(
            "append", lambda: self.engine.append(session_id, token_ids),
            refusal=refusal if token_ids else InputError, tokens=len(token_ids),
            writer=session_id, forwards=lambda _: len(token_ids),
        )  # fmt: skip
        if version is not REFUSED:
            mirror.paid.clear()
            if dropped:
                mirror.evict(dropped)
                self._count("slid")
            mirror.context += self.history.extend(mirror.context, token_ids)
            self._next_version(mirror, version, "append")
        self._watch.check("append")

    def update(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Update the stream, refused where it would pass an eviction or does not fit."""
        mirror = self.mirrors[session_id]
        stream = self.history.token_ids(mirror.context)[mirror.frozen_len :]
        common = common_len(stream, token_ids)
        new = token_ids[common:]
        refusal: Refusal = None
        if not token_ids:
            refusal = InputError
        elif common < len(stream) and mirror.evicted + common < mirror.floor:
            refusal = SessionError
        elif len(token_ids) > self._sizes.context_len - mirror.frozen_len:
            refusal = CapacityError
        version = self._watch.attempt(
            "update", lambda: self.engine.update(session_id, token_ids), refusal=refusal,
            tokens=len(new), writer=session_id, forwards=lambda _: len(new),
        )  # fmt: skip
        if version is not REFUSED:
            mirror.paid.clear()
            mirror.context = mirror.context[: mirror.frozen_len + common]
            mirror.context += self.history.extend(mirror.context, new)
            self._next_version(mirror, version, "update")
        self._watch.check("update")

    def rollback(self, session_id: str, count: int) -> None:
        """Roll back, refused past the frozen prefix or an eviction."""
        mirror = self.mirrors[session_id]
        refusal: Refusal = None
        if count < 1:
            refusal = InputError
        elif count > mirror.kept or mirror.stream_len - count < mirror.floor:
            refusal = SessionError
        version = self._watch.attempt(
            "rollback", lambda: self.engine.rollback(session_id, count), refusal=refusal,
            forwards=lambda _: 0,
        )  # fmt: skip
        if version is not REFUSED:
            mirror.paid.clear()
            mirror.context = mirror.context[:-count]
            self._next_version(mirror, version, "rollback")
        self._watch.check("rollback")

    # Asking

    def advance(
        self, session_id: str, entry: Sequence[int], *, max_new_tokens: int = 0,
        min_gap: float = 0.0, eos_ids: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Pay for tokens ahead; what is kept must be the reference's greedy continuation."""
        mirror = self.mirrors[session_id]
        total = len(entry) + max_new_tokens
        skip = self._skipped(mirror, entry, total)
        paid = self._watch.attempt(
            "advance",
            lambda: self.engine.advance(
                session_id, entry, max_new_tokens=max_new_tokens, min_gap=min_gap, eos_ids=eos_ids
            ),
            refusal=self._beyond_positions(mirror.context, total), tokens=total,
            forwards=lambda paid: len(paid.token_ids) - skip,
        )  # fmt: skip
        if paid is not REFUSED:
            self._answers.check_paid(
                paid, mirror, entry, max_new_tokens=max_new_tokens, min_gap=min_gap,
                eos_ids=eos_ids,
            )  # fmt: skip
            mirror.paid.append((list(paid.token_ids), len(entry)))
        self._watch.check("advance")

    def query(
        self, session_id: str, question: Sequence[int], *, max_new_tokens: int,
        eos_ids: Sequence[int] = (), top_logprobs: int | None = None, commit: bool = False,
    ) -> None:  # fmt: skip
        """Ask greedily; the session is unchanged, or holds question and answer after a commit."""
        mirror = self.mirrors[session_id]
        total = len(question) + max_new_tokens
        skip, ahead = self._paid_of(mirror, question, total, commit)
        answer = self._watch.attempt(
            "query",
            lambda: self.engine.query(
                session_id, question, max_new_tokens=max_new_tokens, eos_ids=eos_ids,
                top_logprobs=top_logprobs, commit=commit,
            ),
            refusal=self._turn_refusal(mirror, total, commit), tokens=total,
            writer=session_id if commit else None,
            forwards=lambda answer: answer.tokens_forwarded,
        )  # fmt: skip
        if answer is not REFUSED:
            records = self._answers.check_greedy(
                answer, mirror, question, skip=skip, ahead=ahead, max_new_tokens=max_new_tokens,
                eos_ids=eos_ids, top_logprobs=top_logprobs, committed=commit,
            )  # fmt: skip
            if commit:
                self._commit(session_id, records)
        self._watch.check("query")

    def generate(self, prompt: Sequence[int], *, max_new_tokens: int) -> None:
        """Ask without a session."""
        nobody = Mirror(context=(), frozen_len=0, when_full="error")
        total = len(prompt) + max_new_tokens
        answer = self._watch.attempt(
            "generate",
            lambda: self.engine.generate(prompt, max_new_tokens=max_new_tokens, top_logprobs=3),
            refusal=self._beyond_positions((), total), tokens=total,
            forwards=lambda answer: answer.tokens_forwarded,
        )  # fmt: skip
        if answer is not REFUSED:
            self._answers.check_greedy(
                answer, nobody, prompt, skip=0, max_new_tokens=max_new_tokens, top_logprobs=3
            )
        self._watch.check("generate")

    def stream_around(
        self, session_id: str, question: Sequence[int], action: Callable[[], None], *,
        taken: int, max_new_tokens: int, commit: bool = False, finish: bool = True,
    ) -> None:  # fmt: skip
        """Take some tokens of a stream, do something else, then finish or abandon the stream.

        Args:
          action: another verb of this object, on whatever session.
          taken: less than max_new_tokens; with 0 the stream begins after the action only, and
            sees what the session is then.
        """
        mirror = self.mirrors[session_id]
        total = len(question) + max_new_tokens
        skip, ahead = self._paid_of(mirror, question, total, commit)
        seen = copy.deepcopy(mirror)
        table = self.engine.session(session_id).entries

        def begin():
            stream = self.engine.stream(
                session_id, question, max_new_tokens=max_new_tokens, commit=commit
            )
            for _ in range(taken):
                next(stream)
            return stream

        stream = self._watch.attempt(
            "stream", begin, refusal=self._turn_refusal(mirror, total, commit),
            tokens=total if taken else 0, writer=session_id if commit else None,
            forwards=lambda _: len(question) - skip + max(taken - 1 - ahead, 0) if taken else 0,
        )  # fmt: skip
        if stream is REFUSED:
            self._watch.check("stream")
            return
        if taken:
            self._watch.suspend(table)
        action()
        is_open = self.mirrors.get(session_id) is mirror
        refusal: Refusal = None
        if finish and not taken:
            refusal = self._turn_refusal(mirror, total, commit) if is_open else SessionError
            skip, ahead = self._paid_of(mirror, question, total, commit)
            seen = copy.deepcopy(mirror)
        elif finish and commit and not (is_open and mirror.version == seen.version):
            refusal = SessionError
        answer = self._watch.attempt(
            "rest of the stream" if finish else "abandoned stream",
            lambda: _exhaust(stream) if finish else stream.close(), refusal=refusal,
            tokens=0 if taken else total, writer=session_id if commit and is_open else None,
        )  # fmt: skip
        self._watch.resumed()
        if finish and answer is not REFUSED:
            records = self._answers.check_greedy(
                answer, seen, question, skip=skip, ahead=ahead, max_new_tokens=max_new_tokens,
                committed=commit,
            )  # fmt: skip
            if commit:
                self._commit(session_id, records)
        self._watch.check("stream")

    def choose(
        self, session_id: str, question: Sequence[int], choices: Sequence[Sequence[int]]
    ) -> None:
        """Choose among continuations; every choice's probability is compared."""
        mirror = self.mirrors[session_id]
        longest = max(len(choice) for choice in choices)
        skip = self._skipped(mirror, question, len(question))
        answer = self._watch.attempt(
            "choose", lambda: self.engine.choose(session_id, question, choices),
            refusal=self._beyond_positions(mirror.context, len(question) + longest),
            tokens=len(question), forwards=lambda answer: answer.tokens_forwarded,
        )  # fmt: skip
        if answer is not REFUSED:
            self._answers.check_choice(
                answer, mirror, question, choices, skip=skip,
                num_rows=self._sizes.step_shapes[-1].num_rows,
            )  # fmt: skip
        self._watch.check("choose")

    def step_together(self, specs: Sequence[RowSpec], *, one_group: bool, write: bool) -> None:
        """Run rows of several sessions in one step, past the verbs; see Together."""
        together = Together(self.engine, specs, one_group=one_group, write=write)
        outcome = self._watch.attempt(
            "step", together.run,
            # Every row may need a page more than its tokens fill.
            tokens=sum(len(spec.token_ids) + self._sizes.page_size for spec in specs),
        )  # fmt: skip
        together.give_back()
        if outcome is not REFUSED:
            together.check(self.history, self.rule, self.mirrors)
        self._watch.check("step")

    # What the reference expects

    def _skipped(self, mirror: Mirror, question: Sequence[int], count: int) -> int:
        """Count what paid tails save of a question; nothing where the pool is too full for them.

        Args:
          count: tokens it may need in all. Behind a part-filled page they may take a page more.
        """
        pages = self.engine.pages
        alone = -(-count // pages.page_size)
        with contextlib.ExitStack() as using:
            for session_id, one in self.mirrors.items():
                if one is mirror:  # what is asked does not give up its own session's pages
                    using.enter_context(session_module.using(self.engine.session(session_id)))
            is_tight = pages.num_free <= alone == pages.num_available
        return 0 if is_tight else mirror.skipped(question)

    def _paid_of(
        self, mirror: Mirror, question: Sequence[int], total: int, commit: bool
    ) -> tuple[int, int]:
        """Count what paid tails save of a question, and of its answer."""
        skip = self._skipped(mirror, question, total - (not commit))
        return skip, mirror.ahead(question) if skip and not commit else 0

    def _beyond_positions(self, context: Context, count: int) -> Refusal:
        return CapacityError if len(context) + count > self._max_positions else None

    def _turn_refusal(self, mirror: Mirror, count: int, commit: bool) -> Refusal:
        """Refuse a turn for its positions, and one to be committed also for its room."""
        refusal = self._beyond_positions(mirror.context, count)
        if commit and refusal is None:
            refusal, _ = mirror.overflow(count, self._sizes)
        return refusal

    def _commit(self, session_id: str, records: Context) -> None:
        """Make a turn part of the stream; what it saw was there, whatever it then evicts."""
        mirror = self.mirrors[session_id]
        _, dropped = mirror.overflow(len(records), self._sizes)
        mirror.context += records
        mirror.paid.clear()
        if dropped:
            mirror.evict(dropped)
            self._count("slid at a commit")
        self._count("commit")
        self._next_version(mirror, self.engine.session(session_id).version, "commit")

    def _next_version(self, mirror: Mirror, got: int, what: str) -> None:
        mirror.version += 1
        require(got == mirror.version, f"{what}: expected version {mirror.version}, got {got}")

    def _count(self, event: str) -> None:
        self.rule.tally.events[event] += 1


def _exhaust(stream) -> Answer:
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value
