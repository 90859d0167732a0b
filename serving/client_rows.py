"""From tables and iterables to the texts of appends.

A table (pandas.DataFrame, pyarrow.Table or RecordBatch) is lines of CSV without a header, which
belongs into the session's prefix, see `header`. Of an iterable every item is a row: text as it is,
a mapping as a line of JSON, token ids as they are.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxstate.errors import InputError
from jaxstate.serving import client_requests
from jaxstate.serving import jaxstate_pb2 as pb

_TEXT_BYTES = 1 << 20  # of one append; longer text is split at its lines


def appends(given: Any, batch_rows: int = 1) -> list[pb.Prompt] | Iterator[pb.Prompt]:
    """Return the appends that something comes to; of what is no iterable of rows, a list.

    Args:
      batch_rows: rows of an iterable that become one append.
    Raises:
      InputError: it is nothing that can be appended.
    """
    if batch_rows < 1:
        raise InputError(f"batch_rows: expected at least 1, got {batch_rows}")
    if is_table(given):
        return list(_texts(table(given)))
    if isinstance(given, str):
        return list(_texts(given))
    if isinstance(given, Mapping):
        return [row(given)]
    if _is_prompt(given):
        return [client_requests.prompt(given, "append")]
    return gathered(map(row, given), batch_rows)


def _is_prompt(given: Any) -> bool:
    """Say whether something is ids, messages, or nothing that can be appended."""
    if not isinstance(given, Iterable) or isinstance(given, bytes) or hasattr(given, "tolist"):
        return True
    if not isinstance(given, Sequence):
        return False
    return not given or client_requests.is_messages(given) or not isinstance(given[0], Iterable)


def row(given: Any) -> pb.Prompt:
    """Return one row of an iterable as an append."""
    if isinstance(given, Mapping):
        given = json.dumps(dict(given), ensure_ascii=False, default=_plain) + "\n"
    return client_requests.prompt(given, "append: a row")


def _plain(value: Any) -> Any:
    """Return what JSON has for a number of NumPy, a date or a decimal."""
    return value.item() if hasattr(value, "item") else str(value)


def gathered(prompts: Iterable[pb.Prompt], count: int) -> Iterator[pb.Prompt]:
    """Join so many rows each to one append; text with text, ids with ids."""
    source = iter(prompts)
    while batch := list(itertools.islice(source, count)):
        for kind, alike in itertools.groupby(batch, lambda one: one.WhichOneof("kind")):
            if kind == "text":
                yield pb.Prompt(text=pb.Text(text="".join(one.text.text for one in alike)))
            elif kind == "tokens":
                ids = itertools.chain.from_iterable(one.tokens.ids for one in alike)
                yield pb.Prompt(tokens=pb.TokenIds(ids=ids))
            else:
                yield from alike


def is_table(given: Any) -> bool:
    """Say whether something is a table, without importing what makes tables."""
    return any(
        kind.__module__.partition(".")[0] in ("pandas", "pyarrow")
        and kind.__name__ in ("DataFrame", "Table", "RecordBatch")
        for kind in type(given).__mro__
    )


def table(given: Any) -> str:
    """Return a table's rows as lines of CSV; a pandas index that means something comes first."""
    if hasattr(given, "to_csv"):
        return given.to_csv(index=_has_index(given), header=False, lineterminator="\n")
    import pyarrow.csv

    lines = io.BytesIO()
    pyarrow.csv.write_csv(given, lines, pyarrow.csv.WriteOptions(include_header=False))
    return lines.getvalue().decode()


def header(given: Any) -> str:
    """Return a table's header as a line of CSV, for the prefix of a session that gets its rows.

    Raises:
      InputError: it is no table.
    """
    if not is_table(given):
        raise InputError(f"header: expected a table, got {type(given).__name__}")
    if hasattr(given, "to_csv"):
        return given.iloc[:0].to_csv(index=_has_index(given), lineterminator="\n")
    import pyarrow.csv

    lines = io.BytesIO()
    pyarrow.csv.write_csv(given.slice(0, 0), lines)
    return lines.getvalue().decode()


def _has_index(frame: Any) -> bool:
    """Say whether an index is more than the rows' numbers."""
    return type(frame.index).__name__ != "RangeIndex"


def _texts(text: str) -> Iterator[pb.Prompt]:
    """Yield text in pieces, whole lines where these are not too long themselves."""
    piece, size = [], 0
    for line in text.splitlines(keepends=True) or [text]:
        for begin in range(0, len(line) or 1, _TEXT_BYTES // 4):  # a character has 4 bytes at most
            part = line[begin : begin + _TEXT_BYTES // 4]
            if size + len(part.encode()) > _TEXT_BYTES:
                yield client_requests.prompt("".join(piece), "append")
                piece, size = [], 0
            piece.append(part)
            size += len(part.encode())
    yield client_requests.prompt("".join(piece), "append")
