"""What the strings of a vocabulary stand for, in bytes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

BLANK = "▁"  # SentencePiece's stand-in for a space
_BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """How token strings are read.

    Attributes:
      alphabet: "bytes", every character stands for one byte as in GPT-2's vocabulary; or "text",
        where ▁ stands for a space.
      byte_fallback: "<0x0A>" stands for the byte 0x0A.
      strip: what is left out of the token that begins a text, because encoding put it there:
        one space, or every ▁ of that token.
    """

    alphabet: Literal["bytes", "text"]
    byte_fallback: bool = False
    strip: Literal["nothing", "space", "blanks"] = "nothing"

    def read(self, token: str, *, added: bool, first: bool) -> bytes:
        """Return the bytes that a token stands for.

        Args:
          added: the token is matched in the text as it stands, so its characters are not GPT-2's
            stand-ins.
          first: the token begins a text.
        """
        if self.alphabet == "bytes":
            try:
                return token.encode() if added else bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # not in the byte alphabet: a name such as those of unused tokens
                return token.encode()
        name = _BYTE_NAME.fullmatch(token) if self.byte_fallback else None
        if name:
            found = bytes([int(name[1], 16)])
        else:
            blanks_go = first and self.strip == "blanks"
            found = token.replace(BLANK, "" if blanks_go else " ").encode()
        if first and self.strip == "space":
            return found.removeprefix(b" ")
        return found


def from_decoder(decoder: Any, origin: str) -> Pieces:
    """Read the decoder of a tokenizer.json.

    Raises:
      ValueError: it does what this package does not know, as WordPiece's.
    """
    parts = _parts(decoder)
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return Pieces(alphabet="bytes")
    readable = bool(parts) and all(_is_known(part) for part in parts)
    if not readable or not {"Replace", "Metaspace"} & set(kinds):
        raise ValueError(
            f"{origin}: decoder: expected one of byte-level BPE or SentencePiece, got "
            f"{' + '.join(map(str, kinds)) or 'none'}; use a model with such a tokenizer"
        )
    strip = "nothing"
    for part in parts:
        if part["type"] == "Strip":
            strip = "space"
        if part["type"] == "Metaspace" and _prepends(part):
            strip = "blanks"
    return Pieces(alphabet="text", byte_fallback="ByteFallback" in kinds, strip=strip)


def without_first_space(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer of a tokenizer.json without the space it puts first."""
    if isinstance(part, list):
        return [without_first_space(inner) for inner in part if not _is_prepend(inner)]
    if not isinstance(part, dict):
        return part
    if _is_prepend(part):
        return None
    changed = {key: without_first_space(inner) for key, inner in part.items()}
    if changed.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
    if "add_prefix_space" in changed:
        changed["add_prefix_space"] = False
    return changed


def _parts(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [part for inner in decoder.get("decoders", []) for part in _parts(inner)]


def _is_known(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    if kind == "Replace":
        return part.get("pattern") == {"String": BLANK} and part.get("content") == " "
    if kind == "Strip":
        return (part.get("content"), part.get("start"), part.get("stop")) == (" ", 1, 0)
    if kind == "Metaspace":
        return part.get("replacement") == BLANK
    return kind in ("ByteFallback", "Fuse")


def _prepends(part: dict[str, Any]) -> bool:
    """Files before the prepend scheme have a flag."""
    scheme = part.get("prepend_scheme")
    return part.get("add_prefix_space", True) if scheme is None else scheme != "never"


def _is_prepend(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"


def _byte_of_char() -> dict[str, int]:
    """Map GPT-2's printable stand-ins to bytes: what prints stands for itself."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + offset): byte for offset, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()
