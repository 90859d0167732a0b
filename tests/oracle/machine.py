"""Random sequences of verbs on several sessions, every one of them checked."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    multiple,
    precondition,
    rule,
)

from oracle import tiny
from oracle.checked import CheckedEngine
from oracle.equality import Tally
from oracle.together import RowSpec

MAX_SESSIONS = 4
ACTIONS = ("append", "fill", "query", "rollback", "update", "advance", "commit")
"""What may come between two tokens of a stream."""

seeds = st.integers(0, 2**16)
shares = st.integers(0, 8)  # eighths


class EngineMachine(RuleBasedStateMachine):
    """Drives a CheckedEngine; subclasses name the setup and keep a tally."""

    setup_: tiny.Setup
    tally: Tally

    sessions = Bundle("sessions")

    def __init__(self):
        super().__init__()
        executor = tiny.compiled(self.setup_)
        self.checked = CheckedEngine(tiny.engine_on(executor, self.setup_), self.setup_)

    def teardown(self):
        """Close everything, so that what leaked shows."""
        if self.checked.is_sound:
            self.checked.close_all()
        self.tally.add(self.checked.rule.tally)

    # Sessions

    def _has_room(self) -> bool:
        return len(self.checked.mirrors) < MAX_SESSIONS

    def _is_busy(self) -> bool:
        return len(self.checked.mirrors) > 1

    @precondition(_has_room)
    @rule(
        target=sessions,
        length=st.sampled_from([0, 0, 1, 3, 4, 7, 9, 1000]),
        when_full=st.sampled_from(["slide", "slide", "error"]),
        seed=seeds,
    )
    def create(self, length, when_full, seed):
        """Create with a frozen prefix that fits, or with one that is just too long."""
        length = min(length, self.setup_.sizes.context_len)
        name = self.checked.create(self._tokens(seed, length), when_full)
        return multiple() if name is None else name

    @precondition(_has_room)
    @rule(target=sessions, session=sessions)
    def fork(self, session):
        return self.checked.fork(session)

    @precondition(_is_busy)
    @rule(session=consumes(sessions))
    def close(self, session):
        self.checked.close(session)

    @rule(session=sessions)
    def repack(self, session):
        self.checked.repack(session)

    # Durable verbs

    @rule(session=sessions, length=st.integers(1, 24), seed=seeds)
    def append(self, session, length, seed):
        self.checked.append(session, self._tokens(seed, length))

    @rule(session=sessions, beyond=st.integers(-1, 2), seed=seeds)
    def append_to_the_brim(self, session, beyond, seed):
        """Append what just fits, or a little less or more."""
        length = self.setup_.sizes.context_len - len(self._mirror(session).context) + beyond
        self.checked.append(session, self._tokens(seed, max(length, 0)))

    @rule(session=sessions, beyond=st.integers(0, 2), seed=seeds)
    def append_a_window(self, session, beyond, seed):
        """Append as much as the whole stream may hold, or more."""
        length = self.setup_.sizes.context_len - self._mirror(session).frozen_len + beyond
        self.checked.append(session, self._tokens(seed, length))

    @rule(
        session=sessions, lengths=st.lists(st.integers(1, 18), min_size=2, max_size=5), seed=seeds
    )
    def append_often(self, session, lengths, seed):
        for index, length in enumerate(lengths):
            self.checked.append(session, self._tokens(seed + index, length))

    @rule(session=sessions, kept=shares, length=st.integers(0, 12), seed=seeds)
    def update(self, session, kept, length, seed):
        """Keep a share of the stream and replace the rest."""
        mirror = self._mirror(session)
        stream = self.checked.history.token_ids(mirror.context)[mirror.frozen_len :]
        new = self._tokens(seed, length)
        self.checked.update(session, stream[: len(stream) * kept // 8] + new)

    @rule(session=sessions, count=st.integers(0, 9))
    def rollback(self, session, count):
        self.checked.rollback(session, count)

    @rule(session=sessions, beyond=st.integers(0, 1))
    def rollback_to_the_floor(self, session, beyond):
        """Roll back as far as the last eviction or the frozen prefix allow, or one further."""
        mirror = self._mirror(session)
        self.checked.rollback(session, mirror.stream_len - mirror.floor + beyond)

    # Asking

    @rule(
        session=sessions,
        reused=shares,
        length=st.integers(0, 9),
        seed=seeds,
        max_new_tokens=st.integers(1, 4),
        top=st.sampled_from([None, 0, 5, 20]),
        ends=st.sampled_from([0, 0, 6]),
        commit=st.sampled_from([False, False, True]),
    )
    def query(self, session, reused, length, seed, max_new_tokens, top, ends, commit):
        self.checked.query(
            session,
            self._question(session, reused, length, seed),
            max_new_tokens=max_new_tokens,
            top_logprobs=top,
            commit=commit,
            eos_ids=self._tokens(seed + 1, ends),
        )

    @rule(session=sessions, beyond=st.integers(0, 1), max_new_tokens=st.integers(1, 3), seed=seeds)
    def query_to_the_last_position(self, session, beyond, max_new_tokens, seed):
        """Ask up to the model's longest position, or one further."""
        taken = len(self._mirror(session).context) + max_new_tokens
        length = self.setup_.model.max_positions - taken + beyond
        self.checked.query(session, self._tokens(seed, length), max_new_tokens=max_new_tokens)

    @rule(
        session=sessions,
        reused=shares,
        length=st.integers(0, 6),
        seed=seeds,
        max_new_tokens=st.integers(0, 3),
        min_gap=st.sampled_from([0.0, 0.0, 0.5]),
        ends=st.sampled_from([0, 4]),
    )
    def advance_and_query(self, session, reused, length, seed, max_new_tokens, min_gap, ends):
        """Advance, then ask what was paid for, a part of it, and more than it."""
        entry = self._question(session, reused, length, seed)
        self.checked.advance(
            session,
            entry,
            max_new_tokens=max_new_tokens,
            min_gap=min_gap,
            eos_ids=self._tokens(seed + 1, ends),
        )
        for question in (entry, entry[:-1] or entry, entry + self._tokens(seed + 2, 3)):
            self.checked.query(session, question, max_new_tokens=2, top_logprobs=3)

    @rule(
        session=sessions,
        reused=shares,
        length=st.integers(0, 14),
        seed=seeds,
        lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
        shared=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    )
    def choose(self, session, reused, length, seed, lengths, shared):
        """Choose among continuations that begin alike, some being prefixes of others."""
        choices: list[tuple[int, ...]] = []
        for index, count in enumerate(lengths):
            begin = choices[-1][: shared[index]] if choices else ()
            choice = (*begin, *self._tokens(seed + 1 + index, count))[:count]
            if choice not in choices:
                choices.append(choice)
        self.checked.choose(session, self._question(session, reused, length, seed), choices)

    @precondition(_is_busy)
    @rule(length=st.integers(1, 30), max_new_tokens=st.integers(1, 4), seed=seeds)
    def generate(self, length, max_new_tokens, seed):
        self.checked.generate(self._tokens(seed, length), max_new_tokens=max_new_tokens)

    @rule(
        session=sessions,
        another=sessions,
        same=st.booleans(),
        seed=seeds,
        taken=st.integers(0, 2),
        action=st.sampled_from(ACTIONS),
        commit=st.booleans(),
        finish=st.sampled_from([True, True, False]),
    )
    def stream_around(self, session, another, same, seed, taken, action, commit, finish):
        """Do something on the same or another session between two tokens of a stream."""
        other = session if same else another
        actions = {
            "append": lambda: self.append(other, 6, seed + 1),
            "fill": lambda: self.append_to_the_brim(other, 0, seed + 1),
            "query": lambda: self.query(other, 4, 3, seed + 1, 2, None, 0, False),
            "rollback": lambda: self.rollback(other, 3),
            "update": lambda: self.update(other, 4, 5, seed + 1),
            "advance": lambda: self.checked.advance(other, self._tokens(seed + 1, 3)),
            "commit": lambda: self.query(other, 4, 3, seed + 1, 2, None, 0, True),
        }
        self.checked.stream_around(
            session,
            self._question(session, seed % 9, 4, seed),
            actions[action],
            taken=taken,
            max_new_tokens=3,
            commit=commit,
            finish=finish,
        )

    @precondition(_is_busy)
    @rule(
        session=consumes(sessions),
        seed=seeds,
        taken=st.integers(0, 1),
        commit=st.booleans(),
        finish=st.booleans(),
    )
    def stream_past_close(self, session, seed, taken, commit, finish):
        self.checked.stream_around(
            session,
            self._tokens(seed, 3),
            lambda: self.checked.close(session),
            taken=taken,
            max_new_tokens=3,
            commit=commit,
            finish=finish,
        )
        if session in self.checked.mirrors:  # the stream was refused
            self.checked.close(session)

    # Steps of several rows

    @rule(
        chosen=st.lists(st.tuples(sessions, st.integers(1, 4)), min_size=1, max_size=4),
        kinds=st.lists(
            st.sampled_from(["behind", "behind", "inside", "tree"]), min_size=4, max_size=4
        ),
        seed=seeds,
        one_group=st.booleans(),
        write=st.booleans(),
    )
    def step_together(self, chosen, kinds, seed, one_group, write):
        specs = []
        for index, ((session, length), kind) in enumerate(zip(chosen, kinds, strict=False)):
            held = len(self._mirror(session).context)
            position, parents = None, None
            if kind == "inside" and held:
                position = (seed + index) % held
            if kind == "tree":
                parents = [-1, 0, 0, 1][:length]
            specs.append(
                RowSpec(
                    session_id=session,
                    token_ids=self._tokens(seed + index, length),
                    position=position,
                    parents=parents,
                )
            )
        self.checked.step_together(specs, one_group=one_group, write=write)

    # Drawing

    def _mirror(self, session: str):
        return self.checked.mirrors[session]

    def _tokens(self, seed: int, length: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return rng.integers(0, self.setup_.model.vocab_size, max(length, 0)).tolist()

    def _question(self, session: str, reused: int, length: int, seed: int) -> list[int]:
        """Begin with a share of what was paid for, if anything was, and go on at random."""
        paid = self._mirror(session).paid
        begin: list[int] = []
        if paid:
            token_ids, _ = paid[seed % len(paid)]
            begin = list(token_ids[: -(-len(token_ids) * reused // 8)])
        return (begin + self._tokens(seed, length)) or self._tokens(seed, 1)


def machine_for(setup: tiny.Setup) -> type[EngineMachine]:
    """Return a machine class for a setup, with a tally of its own."""
    name = f"{setup.name.capitalize()}Machine"
    return type(name, (EngineMachine,), {"setup_": setup, "tally": Tally()})
