"""Stop strings over a token stream: what may be shown already, and when to end."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstate.errors import InputError


class StopStrings:
    """Withholds text that may become a stop string, and cuts at the first that is complete.

    The text before the stop string is released, the stop string itself never.
    """

    def __init__(self, strings: Sequence[str]):
        """Watch for any of `strings`.

        Raises:
          InputError: an empty stop string.
        """
        if any(not string for string in strings):
            raise InputError("stop: expected non-empty strings, got an empty one; leave it out")
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take new text and return what may be shown; sets `stopped` when a string is complete."""
        self._held += text
        starts = [(self._held.find(string), len(string)) for string in self._strings]
        found = [(at + length, at) for at, length in starts if at >= 0]
        if found:
            self.stopped = True
            _, at = min(found)  # complete first, however the text came in pieces
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((self._overlap(string) for string in self._strings), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """Return what was withheld, when no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, string: str) -> int:
        """Length of the longest end of the held text that begins `string`."""
        for length in range(min(len(string) - 1, len(self._held)), 0, -1):
            if self._held.endswith(string[:length]):
                return length
        return 0
