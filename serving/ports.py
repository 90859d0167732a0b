"""Addresses to serve on: whether others reach them, whether they are free, and who has them."""

from __future__ import annotations

import errno
import ipaddress
import pathlib
import socket

_LONGEST = 80  # characters of a command


class PortTakenError(RuntimeError):
    """Somebody else has it."""


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches an address; names but localhost count as others."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_free(host: str, port: int, option: str) -> None:
    """See that one can listen on a port.

    Args:
      option: what sets the port, for the message.
    Raises:
      PortTakenError: somebody else has it; the message names the process.
      OSError: the host is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of a server that is gone are no obstacle, one that listens is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTakenError(
                    f"{option}: expected a free port of {host}, got {port}, which "
                    f"{holder(port)} has; end it or choose another port"
                ) from error
            raise OSError(
                error.errno, f"host: expected an address of this machine, got {host}"
            ) from error


def holder(port: int) -> str:
    """Name the process that has a TCP port, as far as Linux lets this user see it."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for process in pathlib.Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(str(file.readlink()) in sockets for file in (process / "fd").iterdir()):
                return f"process {process.name} ({_command(process)})"
        except OSError:
            continue  # of another user, or gone meanwhile
    return "a process that cannot be seen from here"


def _inodes(port: int) -> set[str]:
    """Inodes of the sockets on a port, those of connections too: they can be what is in the way."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = pathlib.Path("/proc/net", name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # not Linux, or without IPv6
        for line in lines[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _command(process: pathlib.Path) -> str:
    words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    command = " ".join(word.decode(errors="replace") for word in words)
    return command if len(command) <= _LONGEST else f"{command[: _LONGEST - 1]}…"
