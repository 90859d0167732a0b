"""Calls that save sessions and bring them back."""

from __future__ import annotations

from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.rpc_calls import Call


async def snapshot(request: pb.SnapshotRequest, call: Call) -> pb.SavedSnapshot:
    """Save a session."""
    raise NotImplementedError("Snapshot")


async def restore(request: pb.RestoreRequest, call: Call) -> pb.Session:
    """Open a session that was saved."""
    raise NotImplementedError("Restore")


async def list_snapshots(request: pb.ListSnapshotsRequest, call: Call) -> pb.ListSnapshotsResponse:
    """List what is saved."""
    raise NotImplementedError("ListSnapshots")


async def delete_snapshot(
    request: pb.DeleteSnapshotRequest, call: Call
) -> pb.DeleteSnapshotResponse:
    """Forget what was saved."""
    raise NotImplementedError("DeleteSnapshot")
