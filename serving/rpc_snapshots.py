"""Calls that save sessions by name and bring them back."""

from __future__ import annotations

import asyncio
import threading

from jaxstate.errors import SessionError
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import messages
from jaxstate.serving.rpc_calls import Call
from jaxstate.serving.snapshot_store import SnapshotStore


async def snapshot(request: pb.SnapshotRequest, call: Call) -> pb.SavedSnapshot:
    """Save a session; what is saved when its client has gone away stays, under its name."""
    name = call.session_id(request.session_id)
    saved = await call.run_snapshot(
        _store(call).save, call.service, name, request.name, tenant=call.tenant
    )
    return messages.saved_snapshot(saved)


async def restore(request: pb.RestoreRequest, call: Call) -> pb.Session:
    """Open a session that was saved, or have it replace an open one."""
    store = _store(call)
    # Whatever it was called, and whoever has put it here: it becomes the caller's.
    given = request.session_id or (await call.run(store.find, request.name, call.tenant)).session_id
    gone = threading.Event()
    try:
        name = await call.run_snapshot(
            store.restore, call.service, request.name, session_id=call.new_session_id(given),
            tenant=call.tenant, unless=gone.is_set,
        )  # fmt: skip
    except asyncio.CancelledError:
        gone.set()  # what its client has sent since must not be replaced by what came before
        raise
    return messages.session(await call.run(call.service.describe, name))


async def list_snapshots(request: pb.ListSnapshotsRequest, call: Call) -> pb.ListSnapshotsResponse:
    """List what is saved, also what cannot be read any more."""
    found, damaged = await call.run(_store(call).saved, tenant=call.tenant)
    return pb.ListSnapshotsResponse(
        snapshots=[messages.saved_snapshot(one) for one in found], damaged=damaged
    )


async def delete_snapshot(
    request: pb.DeleteSnapshotRequest, call: Call
) -> pb.DeleteSnapshotResponse:
    """Forget what was saved."""
    await call.run(_store(call).delete, request.name, tenant=call.tenant)
    return pb.DeleteSnapshotResponse()


def _store(call: Call) -> SnapshotStore:
    if call.snapshots is None:
        raise SessionError("this server keeps no snapshots; start it with --snapshot-dir")
    return call.snapshots
