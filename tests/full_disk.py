"""Save a session where files may not grow, then where they may; prints what came of both.

In a process of its own: what writes the arrays does it in threads, which die of it unheard.
Argument: a directory.
"""

from __future__ import annotations

import pathlib
import resource
import sys

import tiny_engine

from jaxstate import session_snapshot
from jaxstate.errors import SnapshotSpaceError
from jaxstate.serving import rpc_errors


def main() -> None:
    directory = pathlib.Path(sys.argv[1])
    engine = tiny_engine.build()
    session = engine.session(engine.create(tiny_engine.random_ids(0, 40)))
    snapshot = session_snapshot.take(engine.verbs, session, fingerprint="tiny")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        session_snapshot.write(directory / "one", snapshot)
    except SnapshotSpaceError as error:
        print(rpc_errors.code_of(error).name, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print([path.name for path in directory.iterdir()])
    session_snapshot.write(directory / "one", snapshot)
    print(session_snapshot.read(directory / "one", engine.verbs, fingerprint="tiny").version)


if __name__ == "__main__":
    main()
