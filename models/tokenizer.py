"""Text to token ids and back, whole or as a stream."""

from __future__ import annotations

import codecs
import functools
import pathlib
from collections.abc import Iterable

import tokenizers

from jaxstate.models import vocabulary as vocabulary_lib
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.vocabulary import Vocabulary


class Tokenizer:
    """A byte-level BPE tokenizer with its special tokens.

    Bytes that the vocabulary has no token for are dropped by `encode`, as the original
    tokenizers do (SmolLM2 lacks a few control characters).

    Attributes:
      vocab_size: one more than the largest id that has a token.
      bos_id: id of the token that begins a text, or None.
      eos_ids: ids that end an answer; there may be several, or none.
      add_bos: the model expects `bos_id` first.
      chat_template: Jinja source, or None.
    """

    def __init__(self, vocabulary: Vocabulary):
        """Wrap a vocabulary; usually called by `from_gguf` or `from_hf_dir`."""
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.add_bos = vocabulary.add_bos
        self.chat_template = vocabulary.chat_template
        self._backend = vocabulary.backend
        added = vocabulary.backend.get_added_tokens_decoder()
        self._added_bytes = {idx: token.content.encode() for idx, token in added.items()}
        self._special_ids = frozenset(idx for idx, token in added.items() if token.special)

    @classmethod
    def from_gguf(cls, source: GgufFile | str | pathlib.Path) -> Tokenizer:
        """Build the tokenizer that GGUF metadata describes.

        Raises:
          FileNotFoundError: nothing is there.
          ValueError: no byte-level BPE vocabulary, an unknown pre-tokenizer, or damaged tables.
        """
        file = source if isinstance(source, GgufFile) else GgufFile(source)
        return cls(vocabulary_lib.from_gguf(file))

    @classmethod
    def from_hf_dir(cls, directory: str | pathlib.Path) -> Tokenizer:
        """Build the tokenizer of a Hugging Face directory, from tokenizer.json and its companions.

        Raises:
          ValueError: a file is missing or damaged, or the vocabulary is not byte-level BPE.
        """
        return cls(vocabulary_lib.from_hf_dir(pathlib.Path(directory)))

    @property
    def bos_token(self) -> str:
        """Text of the token that begins a text, or nothing; chat templates ask for it."""
        return "" if self.bos_id is None else self.token_bytes(self.bos_id).decode()

    @property
    def eos_token(self) -> str:
        """Text of the first token that ends an answer, or nothing; chat templates ask for it."""
        return self.token_bytes(self.eos_ids[0]).decode() if self.eos_ids else ""

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
          add_bos: put `bos_id` first.
          parse_special: "<|im_end|>" in the text is the control token; if False it is plain text
            of several tokens, as untrusted text should be.
        Raises:
          ValueError: the text holds lone surrogates, or add_bos without a bos_id.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text: expected Unicode text, got a lone surrogate at index {error.start}; decode "
                "the bytes with errors='replace' first"
            ) from error
        backend = self._backend if parse_special else self._plain_backend
        ids = backend.encode(text, add_special_tokens=False).ids
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise ValueError("add_bos: expected a tokenizer with a bos_id, got none; leave it out")
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id is negative.
        """
        return b"".join(
            self.token_bytes(idx) for idx in ids if not (skip_special and self.is_special(idx))
        ).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for, often only a part of a character.

        An id without a token (models pad their vocabulary) stands for nothing.

        Raises:
          ValueError: the id is negative.
        """
        if token_id < 0:
            raise ValueError(f"token id: expected 0 or more, got {token_id}; drop padding first")
        added = self._added_bytes.get(token_id)
        if added is not None:
            return added
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # not in the byte alphabet: a name such as those of unused tokens
            return token.encode()

    def is_special(self, token_id: int) -> bool:
        """Return whether the id is a control token."""
        return token_id in self._special_ids

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A second tokenizer, because the switch is state shared by threads."""
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain


class Detokenizer:
    """Turns a stream of ids into a stream of text without ever splitting a character.

    The pieces joined equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False):
        """Start a stream; `skip_special` leaves control tokens out of the text."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this id completes, possibly none.

        Raises:
          ValueError: the id is negative.
        """
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character that never became whole, or nothing."""
        return self._decoder.decode(b"", final=True)


def _byte_of_char() -> dict[str, int]:
    """Map GPT-2's printable stand-ins to bytes: what prints stands for itself."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + offset): byte for offset, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()
