"""Where `tail` was in its file, so that it goes on there: no row missed, none appended twice."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

from jaxstate.errors import InputError
from jaxstate.serving.tail_file import Position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a session has got, written down before and behind every append.

    Attributes:
      session: its id.
      writer, sequence: of the last append.
      position: behind what was appended for sure.
      end: behind what may have been appended, if nobody was told; = position if all is.
    """

    session: str
    writer: str
    sequence: int
    position: Position
    end: Position

    def save(self, path: pathlib.Path) -> None:
        """Replace what is in the file, all or nothing."""
        beside = path.with_name(f"{path.name}.new")
        beside.write_text(json.dumps(dataclasses.asdict(self)) + "\n")
        os.replace(beside, path)

    @classmethod
    def load(cls, path: pathlib.Path, session: str) -> Progress | None:
        """Read it; None if there is none yet.

        Raises:
          InputError: it is of another session, or none.
        """
        try:
            found = json.loads(path.read_text())
            places = {name: Position(**found[name]) for name in ("position", "end")}
            progress = cls(**found | places)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"position: expected a file that tail has written, got {path}: {error!r}"
            ) from error
        if progress.session != session:
            raise InputError(
                f"position: expected that of session {session}, got {path}, which is of session "
                f"{progress.session}; choose another file"
            )
        return progress
