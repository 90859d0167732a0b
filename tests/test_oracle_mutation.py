"""Proof that the oracle sees: one small fault at a time in the product, each of which it reports.

A fault is a change of one expression in the source of one function. A scripted scenario runs
through the same checks as the state machines; without a fault it passes.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from oracle import tiny
from oracle.checked import CheckedEngine
from oracle.equality import Mismatch
from oracle.together import RowSpec

from jaxstate import asking, choices, contexts, executor, pages, rows, session, step, tail, tiers
from jaxstate.config import EngineConfig
from jaxstate.kernels_pallas import attention_xla
from jaxstate.models.config import LayerConfig

SETUP = tiny.Setup(
    name="mutated",
    model=dataclasses.replace(
        tiny.WINDOWED.model,
        num_kv_heads=2,
        max_positions=32,
        layers=(LayerConfig(rope=tiny.NEAR, window=5), LayerConfig(rope=tiny.FAR)),
    ),
    sizes=EngineConfig(
        num_pages=48,
        page_size=4,
        context_len=24,
        evict_quantum=3,
        table_capacity=256,
        step_shapes=(tiny.SIXTEEN_IN_BLOCKS,),
        stretch_cells=(8, 4),
        implementation="xla",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One changed expression.

    Attributes:
      name: what is broken.
      module: where the function is.
      function: its name, "Class.method" for a method.
      old, new: the expression, where it first occurs, and what it is changed to.
      users: modules that import the function by name.
      compiled: it is part of what is compiled, so that an executor is built for it.
    """

    name: str
    module: ModuleType
    function: str
    old: str
    new: str
    users: tuple[ModuleType, ...] = ()
    compiled: bool = False

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the function; fails if the source no longer reads as expected."""
        *path, name = self.function.split(".")
        holder: Any = getattr(self.module, path[0]) if path else self.module
        source = textwrap.dedent(inspect.getsource(getattr(holder, name)))
        assert self.old in source, f"{self.name}: {self.old!r} is not in {self.function}"
        made: dict[str, Callable] = {}
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new, 1)
        exec(compile(code, f"<{self.name}>", "exec"), vars(self.module), made)
        for place in (holder, *self.users):
            monkeypatch.setattr(place, name, made[name])


def compiled(name: str, module: ModuleType, function: str, old: str, new: str, **more) -> Fault:
    return Fault(
        name=name, module=module, function=function, old=old, new=new, compiled=True, **more
    )


def on_host(name: str, module: ModuleType, function: str, old: str, new: str, **more) -> Fault:
    return Fault(name=name, module=module, function=function, old=old, new=new, **more)


COMPILED = [
    compiled(
        "step tokens do not see themselves",
        attention_xla,
        "tail_visible",
        "(distance >= 0)",
        "(distance >= 1)",
    ),
    compiled(
        "step tokens see a window one too long",
        attention_xla,
        "tail_visible",
        "distance < window",
        "distance <= window",
    ),
    compiled(
        "cells at a token's own position are hidden",
        attention_xla,
        "context_attention",
        "(distance >= 0)",
        "(distance >= 1)",
    ),
    compiled(
        "cells behind a token's position are seen",
        attention_xla,
        "context_attention",
        "(distance >= 0)",
        "(distance >= -1)",
    ),
    compiled(
        "cells are seen through a window one too long",
        attention_xla,
        "context_attention",
        "distance < window",
        "distance <= window",
    ),
    compiled(
        "one cell past an entry's fill is seen",
        attention_xla,
        "context_attention",
        "cell_idx < item[work_columns.FILL]",
        "cell_idx <= item[work_columns.FILL]",
    ),
    compiled(
        "an entry's first cell is hidden",
        attention_xla,
        "context_attention",
        "cell_idx >= item[work_columns.FIRST]",
        "cell_idx > item[work_columns.FIRST]",
    ),
    compiled(
        "a row sees the next row's context",
        attention_xla,
        "context_attention",
        "rows >= item[work_columns.ROW_BEGIN]",
        "rows >= item[work_columns.ROW_BEGIN] - 1",
    ),
    compiled(
        "queries are turned the wrong way by a shift",
        attention_xla,
        "context_attention",
        "shifts[item_idx].reversed",
        "shifts[item_idx]",
    ),
    compiled(
        "keys are stored without their shift",
        step,
        "step",
        'turn(k, tables["write_shifts"].reversed[:, None])',
        "k",
        users=(executor,),
    ),
    compiled(
        "all layers have the first one's window",
        step,
        "step",
        "window=layer.window,\n            precision",
        "window=5,\n            precision",
        users=(executor,),
    ),
]

ON_HOST = [
    on_host(
        "shifts are off by one",
        session,
        "stream_shifts",
        "- evicted)",
        "- evicted + 1)",
    ),
    on_host(
        "rotations never start over",
        session,
        "stream_shifts",
        "index // epoch * epoch",
        "index * 0",
    ),
    on_host(
        "sliding forgets the shift",
        pages,
        "cut_middle",
        "shift=entry.shift - count",
        "shift=entry.shift",
        users=(session,),
    ),
    on_host(
        "sliding keeps one token too many",
        pages,
        "cut_middle",
        "position + count - entry.base",
        "position + count - 1 - entry.base",
        users=(session,),
    ),
    on_host(
        "a cut keeps one cell too many",
        pages,
        "cut_end",
        "position - entry.base)",
        "position + 1 - entry.base)",
        users=(session,),
    ),
    on_host(
        "an owner writes what others see",
        pages,
        "Pages.can_continue",
        " or header.high_water <= entry.fill",
        " or True",
    ),
    on_host(
        "anybody continues a page",
        pages,
        "Pages.can_continue",
        "header.owner != owner or ",
        "",
    ),
    on_host(
        "pages of others are given back",
        pages,
        "Pages.drop",
        "header.references == 0",
        "header.references <= 1",
    ),
    on_host("a closed tail keeps its pages", tail, "Tail.close", "self._all_entries)", "())"),
    on_host(
        "stretches of different shifts are joined",
        pages,
        "stretches",
        " and last.shift == shift",
        "",
    ),
    on_host(
        "a token sees one after it",
        rows,
        "_sees",
        "np.tril(np.ones((count, count), bool))",
        "np.tril(np.ones((count, count), bool), -1)",
    ),
    on_host(
        "tree tokens do not see their ancestors",
        rows,
        "_sees",
        "sees[index] |= sees[parent]",
        "sees[index, parent] = True",
    ),
    on_host(
        "rows see each other",
        rows,
        "pack",
        "tail_mask[span, span] = _sees(count, row.parents)",
        "tail_mask[span, :at + count] = np.tril(np.ones((at + count,) * 2, bool))[span]",
    ),
    on_host(
        "a group's context is shown to its first row only",
        rows,
        "pack",
        "first_row, row_idx, blocks",
        "first_row, first_row + 1, blocks",
    ),
    on_host(
        "a context is shown to its first block only",
        rows,
        "_blocks",
        "-(-(first_token + count) // block_tokens)",
        "first_token // block_tokens + 1",
    ),
    on_host(
        "paid tokens are taken one too many",
        session,
        "common_len",
        "return int(differs[0]) if",
        "return min(int(differs[0]) + 1, count) if",
    ),
    on_host(
        "a paid tail's last distribution stands for its entry's",
        session,
        "PaidTail.behind",
        "count - self.entry_len :",
        "-1:",
    ),
    on_host(
        "a query writes the session's own pages",
        asking,
        "Asking._answer",
        "session.owner if commit else next(self._owners)",
        "session.owner",
    ),
    on_host(
        "a commit leaves out the last token",
        asking,
        "Asking._commit",
        "yield from tail.forward(answer[-1:], want_last=False)",
        "pass",
    ),
    on_host(
        "a change keeps outdated paid tails",
        tiers,
        "Tiers.forget_paid",
        "for paid in session.paid:",
        "return\n    for paid in session.paid:",
    ),
    on_host(
        "an eviction may be rolled back",
        contexts,
        "Contexts.drop_oldest",
        "session.stream_floor = session.stream_len",
        "pass",
    ),
    on_host(
        "eviction is not in whole quanta",
        session,
        "overflow_evictions",
        "-(-overflow // quantum) * quantum",
        "overflow",
    ),
    on_host(
        "stopping early is not left what remains",
        choices,
        "ChoiceTree.scores",
        "left = 1.0 - taken if node.children else 1.0",
        "left = 1.0",
    ),
]


def play(checked: CheckedEngine) -> None:
    """Visit every verb, and every rule of sight, rotation and ownership, at least once."""
    rng = np.random.default_rng(7)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, SETUP.model.vocab_size, count).tolist()

    def step_through(sessions: list[str]) -> None:
        for one_group in (False, True):
            checked.step_together(
                [
                    RowSpec(session_id=sessions[0], token_ids=tokens(3)),
                    RowSpec(session_id=sessions[0], token_ids=tokens(2)),
                    RowSpec(session_id=sessions[1], token_ids=tokens(3)),
                    RowSpec(session_id=sessions[1], token_ids=tokens(2), position=4),
                ],
                one_group=one_group,
                write=True,
            )
        checked.step_together(
            [RowSpec(session_id=sessions[0], token_ids=tokens(4), parents=[-1, 0, 1, 0])],
            one_group=True,
            write=False,
        )

    first = checked.create(tokens(3), "slide")
    checked.append(first, tokens(9))
    question = tokens(5)
    checked.query(first, question, max_new_tokens=3, top_logprobs=5)
    checked.append(first, tokens(1))
    second = checked.fork(first)
    step_through([first, second])
    # Both were cut inside a page that the other sees, and go on there.
    for name in (first, second):
        checked.rollback(name, 3)
        checked.append(name, tokens(2))
        checked.append(name, tokens(3))
    step_through([first, second])
    # Paid tails: asked exactly, a part of one, more than one, and after an append.
    checked.advance(first, question, max_new_tokens=2)
    for asked in (question, question[:3], question + tokens(2), question[:4] + tokens(3)):
        checked.query(first, asked, max_new_tokens=2, top_logprobs=2)
    checked.choose(first, question, [(1,), (1, 2), (3, 4), (3, 4, 5, 6), (3,)])
    checked.choose(first, tokens(6), [(1, 2, 3, 4), (1, 2, 3, 5), (7,)])
    checked.append(first, tokens(1))
    checked.query(first, question, max_new_tokens=1)
    # Sliding, past two rotation epochs.
    for _ in range(11):
        checked.append(first, tokens(5))
        checked.query(first, tokens(3), max_new_tokens=2)
        checked.advance(first, tokens(2))
    checked.rollback(first, 2)
    checked.rollback(first, 10)
    checked.update(first, checked.history.token_ids(checked.mirrors[first].context)[3:-1] + [7, 8])
    checked.query(first, tokens(2), max_new_tokens=3, commit=True)
    third = checked.fork(first)
    step_through([first, third])
    checked.stream_around(
        third, tokens(2), lambda: checked.append(third, tokens(3)), taken=1, max_new_tokens=2
    )
    checked.close(first)
    checked.append(third, tokens(3))
    checked.generate(tokens(9), max_new_tokens=2)
    checked.close_all()


def test_mutation_script_passes_without_one():
    checked = CheckedEngine(tiny.engine_on(tiny.compiled(SETUP), SETUP), SETUP)
    play(checked)
    events = checked.rule.tally.events
    assert min(events[name] for name in ("slid", "commit", "past two rotation epochs")) > 0


@pytest.mark.parametrize("fault", COMPILED + ON_HOST, ids=lambda fault: fault.name)
def test_mutation_is_reported(fault: Fault, monkeypatch: pytest.MonkeyPatch):
    fault.plant(monkeypatch)
    if fault.compiled:
        on = executor.Executor(tiny.params_of(SETUP), SETUP.model, SETUP.sizes)
    else:
        on = tiny.compiled(SETUP)
    checked = CheckedEngine(tiny.engine_on(on, SETUP), SETUP)
    with pytest.raises(Mismatch) as caught:
        play(checked)
    print(caught.value)
