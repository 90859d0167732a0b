"""Many sessions over one pool: the engine of a process, one verb at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Unpack

from jaxstate.answer import Answer, Token
from jaxstate.config import EngineConfig
from jaxstate.errors import SessionError
from jaxstate.executor import Executor, Progress
from jaxstate.generation import RequestOptions
from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params
from jaxstate.models.sharding import Sharding
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.needs import Steps, run_alone, stream_alone
from jaxstate.session import PaidTail, Session, WhenFull
from jaxstate.tiers import Tier
from jaxstate.verbs import Verbs


class Engine:
    """Sessions on a model, in one process and one thread; time and threads are the caller's.

    A verb either does all it says or raises and leaves every session bitwise as it was.
    """

    def __init__(
        self,
        params: Params,
        model: ModelConfig,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        sharding: Sharding | None = None,
        progress: Progress | None = None,
    ):
        """Allocate the pool and compile all steps.

        Args:
          params: weights, tree of `param_specs(model)`; check them with `check_params` first.
          tokenizer: turns answers into text; without one, answers are token ids only.
          sharding: `Sharding.of(model, mesh)` spreads weights and pool over several devices.
          progress: called after each compilation, see `executor.Progress`.
        Raises:
          ValueError: the engine's sizes do not fit the model.
        """
        config.check_model(model)
        self.model = model
        self.config = config
        self.executor = Executor(params, model, config, sharding=sharding, progress=progress)
        self.verbs = Verbs(self.executor, model, config, tokenizer)
        self.pages = self.verbs.pages

    # Sessions

    def create(
        self,
        frozen: Sequence[int] = (),
        *,
        session_id: str | None = None,
        when_full: WhenFull = "error",
        tenant: str = "",
    ) -> str:
        """Open a session whose context starts with `frozen`, which is never evicted.

        Of the prefix only that is forwarded which no context of the same tenant has, see
        EngineConfig.prefix_share; Session.cached_tokens says how much there was.

        Returns:
          its id.
        Raises:
          InputError: a token id out of range, or `when_full` unknown.
          SessionError: the id is taken.
          CapacityError: the prefix does not fit.
        """
        return self._run(self.verbs.create(frozen, session_id, when_full, tenant))

    def session(self, session_id: str) -> Session:
        """Return a session's record; treat it as read-only.

        Raises:
          SessionError: unknown or closed.
        """
        return self.verbs.session(session_id)

    @property
    def session_ids(self) -> list[str]:
        """Ids of the open sessions."""
        return list(self.verbs.sessions)

    def fork(self, session_id: str, *, new_id: str | None = None) -> str:
        """Open a session with the same context; table entries are copied, no key or value moves.

        Raises:
          SessionError: unknown session, or the new id is taken.
        """
        return self.verbs.fork(session_id, new_id=new_id)

    def move_out(self, session_id: str, tier: Tier) -> None:
        """Move an idle session's cells to host memory or disk; the next verb brings them back.

        By itself it happens where pages lack, see EngineConfig.host_bytes and swap_dir.

        Raises:
          SessionError: unknown session, or a verb runs on it.
          CapacityError: there is no such tier, or no room in it.
        """
        session = self.session(session_id)
        if session.running:
            raise SessionError(f"session {session_id}: {session.running} verbs run on it; wait")
        self.verbs.tiers.move_out(session, tier)

    def close(self, session_id: str) -> None:
        """Close a session and free its cells.

        Raises:
          SessionError: unknown or closed already.
        """
        self.verbs.close(session_id)

    # Durable verbs

    def append(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Feed known tokens to the stream; returns the session's new version.

        A full session with when_full="slide" first drops its oldest stream tokens, decided once
        per append: ceil(overflow / quantum) * quantum.

        Raises:
          InputError: no tokens, or an id out of range.
          CapacityError: it does not fit the window, the model's positions or the pool.
          SessionError: unknown session.
        """
        return self._run(self.verbs.append(session_id, token_ids))

    def update(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Make the kept stream equal to `token_ids`, forwarding only what differs.

        Keeps the longest common prefix and replaces the rest; returns the new version.

        Raises:
          SessionError: unknown session, or the common prefix ends before the last eviction.
          InputError, CapacityError: as for append.

        Source: Stream2LLM (arXiv:2604.16395).
        """
        return self._run(self.verbs.update(session_id, token_ids))

    def rollback(self, session_id: str, count: int) -> int:
        """Drop the last `count` stream tokens; returns the new version.

        Raises:
          InputError: count < 1.
          SessionError: unknown session, a shorter stream, or an eviction in between.
        """
        return self.verbs.rollback(session_id, count)

    # Asking

    def advance(
        self,
        session_id: str,
        entry: Sequence[int],
        *,
        max_new_tokens: int = 0,
        min_gap: float = 0.0,
        eos_ids: Sequence[int] = (),
        slot_ids: Sequence[int] = (),
    ) -> PaidTail:
        """Forward tokens a request is expected to bring, and keep them with their distribution.

        Then decode ahead greedily to the next decision point: before an end token or where the gap
        is below `min_gap`, behind a token of `slot_ids` (which opens what is to be chosen), or
        after `max_new_tokens`. A query whose question begins with the paid tokens forwards only
        the rest; one that asks for exactly the entry is answered by what was decoded. The next
        durable operation drops the tail.

        Raises:
          InputError, CapacityError, SessionError: as for query.

        Source: speculative pre-positioning (arXiv:2606.29565).
        """
        steps = self.verbs.advance(
            session_id, entry, max_new_tokens=max_new_tokens, min_gap=min_gap, eos_ids=eos_ids,
            slot_ids=slot_ids,
        )  # fmt: skip
        return self._run(steps)

    def stream(
        self,
        session_id: str,
        question: Sequence[int],
        *,
        max_new_tokens: int,
        commit: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Generator[Token, None, Answer]:
        """Ask, and yield tokens as they are drawn; the generator returns the Answer.

        The session is unchanged, unless `commit` makes question and answer part of the stream.
        Cells are given back when the generator ends or is closed.

        Args:
          question: token ids, at least one.
          options: sampling, eos_ids, stop, top_logprobs; see `generation.Request`. And constraint,
            what the answer has to be, see `Constraint`. Stop strings and constraints need the
            engine to have a tokenizer.
        Raises:
          InputError: an empty question, ids out of range, contradictory settings.
          CapacityError: question and answer exceed the model's positions or the free pages.
          SessionError: unknown session.
        """
        steps = self.verbs.stream(
            session_id, question, max_new_tokens=max_new_tokens, commit=commit, **options
        )
        return stream_alone(self.executor, steps)

    def query(
        self,
        session_id: str,
        question: Sequence[int],
        *,
        max_new_tokens: int,
        commit: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Ask and return the whole answer; see `stream` for arguments and errors."""
        return _finish(
            self.stream(
                session_id, question, max_new_tokens=max_new_tokens, commit=commit, **options
            )
        )

    def choose(
        self, session_id: str, question: Sequence[int], choices: Sequence[Sequence[int]]
    ) -> Answer:
        """Answer with the most probable of fixed continuations, scored on their real token ids.

        All choices are scored in the steps of the question itself, as a tree behind its last
        token; the session is unchanged.

        Args:
          choices: token ids of each choice; one may be a prefix of another, see ChoiceTree.
        Raises:
          InputError, CapacityError, SessionError: as for query.
        """
        return self._run(self.verbs.choose(session_id, question, choices))

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        tenant: str = "",
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Answer a prompt without a session; options as for query, beginnings as for create."""
        return _finish(
            self.stream_generate(prompt, max_new_tokens=max_new_tokens, tenant=tenant, **options)
        )

    def stream_generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        tenant: str = "",
        **options: Unpack[RequestOptions],
    ) -> Generator[Token, None, Answer]:
        """Like `stream`, without a session."""
        steps = self.verbs.stream_generate(
            prompt, max_new_tokens=max_new_tokens, tenant=tenant, **options
        )
        return stream_alone(self.executor, steps)

    # Figures

    @property
    def cells_used(self) -> int:
        """Cells that open sessions see, those shared by several counted once."""
        seen = {
            (entry.page, cell)
            for session in self.verbs.sessions.values()
            for entry in session.entries
            for cell in range(entry.first, entry.fill)
        }
        return len(seen)

    @property
    def cells_held(self) -> int:
        """Cells of all pages in use."""
        return (self.pages.num_pages - self.pages.num_free) * self.pages.page_size

    @property
    def bytes_held(self) -> int:
        """Bytes of all pages in use."""
        return self.cells_held * self.model.bytes_per_cell

    def _run(self, steps: Steps):
        return run_alone(self.executor, steps)


def _finish(stream: Iterator[Token]) -> Answer:
    """Exhaust a stream and return what its generator returned."""
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value
