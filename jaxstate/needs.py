"""Verbs as generators: each says what it needs forwarded, and whoever drives it runs the steps.

Alone, a verb's needs are met one after another (`run_alone`, `stream_alone`); a scheduler collects
the needs of many verbs and meets them in the same steps (`run_together`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from jaxstate.answer import Token
from jaxstate.executor import Executor, StepResult
from jaxstate.pages import Stretch
from jaxstate.rows import Group, RowInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """Tokens that a verb wants forwarded before it goes on.

    Attributes:
      tokens: how many.
      least: fewest that can be forwarded at once.
      outputs: rows of output that the last of them wants; none before it.
      row: row(count) is the input of the next tokens, `count` or a few less.
    """

    tokens: int
    least: int
    outputs: int
    row: Callable[[int], RowInput]


class Ran(NamedTuple):
    """What came of a need: tokens forwarded, and the step's outputs from the row's first on."""

    tokens: int
    result: StepResult


Steps = Generator[Need, Ran, Any]
"""A verb: yields needs, is sent what came of them, returns the verb's result."""

TokenSteps = Generator[Need | Token, Any, Any]
"""A verb that also yields the tokens of an answer as they are drawn, and is sent nothing then."""


def run_alone(executor: Executor, steps: Steps) -> Any:
    """Run a verb to its end in steps of its own, as few as possible."""
    try:
        need = next(steps)
        while True:
            need = steps.send(_meet(executor, need))
    except StopIteration as end:
        return end.value
    finally:
        steps.close()


def stream_alone(executor: Executor, steps: TokenSteps) -> Generator[Token, None, Any]:
    """Run a verb likewise, and yield its tokens; closing the generator ends the verb."""
    try:
        item = next(steps)
        while True:
            if isinstance(item, Need):
                item = steps.send(_meet(executor, item))
            else:
                yield item
                item = next(steps)
    except StopIteration as end:
        return end.value
    finally:
        steps.close()


def run_together(executor: Executor, needs: Sequence[tuple[Need, int]]) -> list[Ran]:
    """Meet parts of several needs; what neighbours see alike is read once.

    One step, or two where that costs less: blocks of many tokens would drag the contexts of rows
    that have one token.

    Args:
      needs: each with how many of its tokens are to run; together they fit a step.
    Raises:
      CapacityError: they do not, or see more stretches than a table holds. What has run by then
        may run again: it writes the same once more.
    """
    rows = [need.row(count) for need, count in needs]
    ones = [index for index, row in enumerate(rows) if len(row.token_ids) == 1]
    more = [index for index, row in enumerate(rows) if len(row.token_ids) > 1]
    whole = executor.cost(group_rows(rows))
    parts = [list(range(len(rows)))]
    if ones and more:
        apart = [group_rows([rows[index] for index in part]) for part in (ones, more)]
        if sum(executor.cost(groups) for groups in apart) < whole:
            parts = [ones, more]
    found: dict[int, Ran] = {}
    for part in parts:
        result = executor.run(group_rows([rows[index] for index in part]))
        first = 0
        for index in part:
            found[index] = Ran(len(rows[index].token_ids), result.rows_from(first))
            first += len(rows[index].wanted)
    return [found[index] for index in range(len(rows))]


def group_rows(rows: Sequence[RowInput]) -> list[Group]:
    """Group neighbouring rows that see most of their contexts alike.

    A group has one shared context: one that has formed is not cut down for a newcomer.
    """
    groups: list[Group] = []
    for row in rows:
        group = groups[-1] if groups else Group(rows=[], context=())
        common = _common(group.context, row.context)
        if len(group.rows) == 1:
            # What the first one saw and the second does not, it sees for itself.
            [first] = group.rows
            enough = 2 * _cells(common) >= min(_cells(group.context), _cells(row.context))
            rest = _behind(group.context, common)
            members = [dataclasses.replace(first, context=rest)]
        else:
            enough = common == tuple(group.context)
            members = list(group.rows)
        if not common or not enough:
            own = dataclasses.replace(row, context=())
            groups.append(Group(rows=[own], context=tuple(row.context)))
            continue
        members.append(dataclasses.replace(row, context=_behind(row.context, common)))
        groups[-1] = Group(rows=members, context=common)
    return groups


def _cells(context: Sequence[Stretch]) -> int:
    return sum(stretch.end - stretch.begin for stretch in context)


def _common(left: Sequence[Stretch], right: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """The longest beginning of both, cut within a stretch if need be."""
    common: list[Stretch] = []
    for one, other in zip(left, right, strict=False):
        if (one.begin, one.base, one.shift) != (other.begin, other.base, other.shift):
            break
        end = min(one.end, other.end)
        common.append(one._replace(end=end))
        if one.end != other.end:
            break
    return tuple(common)


def _behind(context: Sequence[Stretch], beginning: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """What of a context comes behind a beginning of it."""
    if not beginning:
        return tuple(context)
    last = context[len(beginning) - 1]
    rest = context[len(beginning) :]
    end = beginning[-1].end
    return tuple(rest) if end == last.end else (last._replace(begin=end), *rest)


def _meet(executor: Executor, need: Need) -> Ran:
    return run_together(executor, [(need, min(need.tokens, executor.longest_step))])[0]
