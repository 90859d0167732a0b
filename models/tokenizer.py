"""Text to token ids and back, whole or as a stream."""

from __future__ import annotations

import codecs
import dataclasses
import datetime
import functools
import json
import logging
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from jaxstate.models import chat_template, pieces, vocabulary_gguf, vocabulary_hf
from jaxstate.models.constraints import Constraints
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_JOINT_TOKENS = 32  # of a left text; what lies further away does not change what comes behind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation as the model sees it.

    Attributes:
      text: what the template made of the messages.
      ids: its token ids, all of them: nothing is to be put before or behind.
    """

    text: str
    ids: list[int]


class Tokenizer:
    """A BPE or Unigram tokenizer with its special tokens.

    Bytes that the vocabulary has no token for are dropped by `encode`, as the original
    tokenizers do (SmolLM2 lacks a few control characters).

    Attributes:
      vocabulary: what it was made of.
      vocab_size: one more than the largest id that has a token.
      bos_id: id of the token that begins a text, or None.
      eos_ids: ids that end an answer; there may be several, or none.
      add_bos: the model expects `bos_id` first.
      chat_template: Jinja source, or None.
    """

    def __init__(self, vocabulary: Vocabulary):
        """Wrap a vocabulary; usually called by `from_gguf` or `from_hf_dir`.

        Raises:
          ValueError: the chat template is broken.
        """
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.add_bos = vocabulary.add_bos
        self.chat_template = vocabulary.chat_template
        self._pieces = vocabulary.pieces
        self._backend = vocabulary.backend
        self._encoders = {(True, False): vocabulary.backend}  # by (parse_special, continues)
        self._puts_space_first = _puts_space_first(vocabulary.backend)
        added = vocabulary.backend.get_added_tokens_decoder()
        self._added = {idx: token.content for idx, token in added.items()}
        self._special_ids = frozenset(idx for idx, token in added.items() if token.special)
        self._warned = False
        if self.chat_template is not None:
            chat_template.check(
                self.chat_template, bos_token=self.bos_token, eos_token=self.eos_token
            )

    @classmethod
    def from_gguf(cls, source: GgufFile | str | pathlib.Path) -> Tokenizer:
        """Build the tokenizer that GGUF metadata describes.

        Raises:
          FileNotFoundError: nothing is there.
          ValueError: no byte-level or SentencePiece BPE vocabulary, an unknown pre-tokenizer,
            damaged tables, or a broken chat template.
        """
        file = source if isinstance(source, GgufFile) else GgufFile(source)
        return cls(vocabulary_gguf.from_gguf(file))

    @classmethod
    def from_hf_dir(cls, directory: str | pathlib.Path) -> Tokenizer:
        """Build the tokenizer of a Hugging Face directory, from tokenizer.json and its companions.

        Raises:
          ValueError: a file is missing or damaged, the vocabulary is of a kind that is not
            supported, or the chat template is broken.
        """
        return cls(vocabulary_hf.from_hf_dir(pathlib.Path(directory)))

    @property
    def bos_token(self) -> str:
        """Text of the token that begins a text, or nothing; chat templates ask for it."""
        return "" if self.bos_id is None else self.token_bytes(self.bos_id).decode()

    @property
    def eos_token(self) -> str:
        """Text of the first token that ends an answer, or nothing; chat templates ask for it."""
        return self.token_bytes(self.eos_ids[0]).decode() if self.eos_ids else ""

    def encode(
        self,
        text: str,
        *,
        add_bos: bool = False,
        parse_special: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
          add_bos: put `bos_id` first, unless the text begins with that token already, as the text
            of a chat template may.
          parse_special: "<|im_end|>" in the text is the control token; if False it is plain text
            of several tokens, as untrusted text should be.
          continues: the text goes on from an earlier one, so no space is put before it, which
            SentencePiece vocabularies do where a text begins.
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
        ids = self._encode(text, parse_special, False)
        if continues and self._puts_space_first:
            # Text behind a control token gets its space as ever: only the first stretch differs.
            apart = self._encode(text, parse_special, True)
            ids = apart[: self._first_added(apart)] + ids[self._first_added(ids) :]
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise ValueError("add_bos: expected a tokenizer with a bos_id, got none; leave it out")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def encode_chat(
        self,
        messages: Sequence[chat_template.Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: datetime.datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Chat:
        """Return the exact text and token ids of a conversation.

        The model's template decides on everything, BOS included. Without one, as base models
        are, the messages' texts are joined by blank lines, with a warning on first use.

        Args:
          tools, documents, now, variables: see chat_template.render.
        Raises:
          ValueError: a message without role, or the template refuses the messages.
        """
        if self.chat_template is None:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "the model has no chat template; messages go to it as raw text, without roles"
                )
            text = chat_template.raw_text(messages)
            return Chat(text=text, ids=self.encode(text, add_bos=self.add_bos))
        text = chat_template.render(
            messages,
            self.chat_template,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            tools=tools,
            documents=documents,
            now=now,
            variables=variables,
        )
        return Chat(text=text, ids=self.encode(text))

    def forced_boundary(
        self, left_ids: Sequence[int], text: str, *, parse_special: bool = True
    ) -> bool:
        """Return whether appending a text forces a token boundary that one text would not have.

        A session's ids stay as they are, so `text` is encoded by itself; this tells whether
        encoding both as one text would have come out differently, say with a token across the
        joint.

        Args:
          left_ids: ids that the text is appended to; the last 32 decide.
          text: what is appended, encoded with `continues`.
          parse_special: as for `encode`.
        """
        left = self.decode(left_ids[-_JOINT_TOKENS:])
        left, text, both = (
            self.encode(part, parse_special=parse_special, continues=True)
            for part in (left, text, left + text)
        )
        return left + text != both

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        The space that SentencePiece vocabularies put before a text is left out again.

        Raises:
          ValueError: an id is negative.
        """
        found: list[bytes] = []
        begun = False
        for idx in ids:
            if not (skip_special and self.is_special(idx)):
                found.append(self.token_bytes(idx, first=not begun))
                begun = begun or bool(self.token_bytes(idx))
        return b"".join(found).decode(errors="replace")

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Return the bytes a token stands for, often only a part of a character.

        An id without a token (models pad their vocabulary) stands for nothing.

        Args:
          first: the token begins a text, so that a space which encoding put there is left out.
        Raises:
          ValueError: the id is negative.
        """
        if token_id < 0:
            raise ValueError(f"token id: expected 0 or more, got {token_id}; drop padding first")
        added = self._added.get(token_id)
        token = self._backend.id_to_token(token_id) if added is None else added
        if token is None:
            return b""
        return self._pieces.read(token, added=added is not None, first=first)

    def is_special(self, token_id: int) -> bool:
        """Return whether the id is a control token."""
        return token_id in self._special_ids

    @functools.cached_property
    def constraints(self) -> Constraints:
        """What text of these tokens can be held to; control tokens are no text."""
        ids = range(self.vocab_size)
        return Constraints([b"" if self.is_special(i) else self.token_bytes(i) for i in ids])

    def _encode(self, text: str, parse_special: bool, continues: bool) -> list[int]:
        """Encode by one of up to four tokenizers, because switches are state shared by threads."""
        key = (parse_special, continues)
        if key not in self._encoders:
            description = self._backend.to_str()
            if continues:
                parts = json.loads(description)
                for part in ("normalizer", "pre_tokenizer"):
                    parts[part] = pieces.without_first_space(parts[part])
                description = json.dumps(parts)
            encoder = tokenizers.Tokenizer.from_str(description)
            encoder.encode_special_tokens = not parse_special
            self._encoders[key] = encoder
        return self._encoders[key].encode(text, add_special_tokens=False).ids

    def _first_added(self, ids: list[int]) -> int:
        return next((index for index, idx in enumerate(ids) if idx in self._added), len(ids))


class Detokenizer:
    """Turns a stream of ids into a stream of text without ever splitting a character.

    The pieces joined equal `Tokenizer.decode` of all ids. Behind a context they are what the ids
    add to its text: every character that they complete, also one that the context began, and
    never a part of the context itself.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = False,
        context: Iterable[int] = (),
        continues: bool = False,
    ):
        """Start a stream.

        Args:
          skip_special: leave control tokens out of the text.
          context: ids before the stream; the last few are enough.
          continues: the stream's first token stands for all of its bytes, as if text came before.
        Raises:
          ValueError: an id is negative.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        before = b"".join(tokenizer.token_bytes(idx) for idx in context if not self._skips(idx))
        self._begun = continues or bool(before)
        self._decoder.decode(before[-3:])  # a character is at most 4 bytes
        self._unfinished = self._decoder.getstate()[0]  # of the context, until it is continued

    def push(self, token_id: int) -> str:
        """Return the text that this id completes, possibly none.

        Raises:
          ValueError: the id is negative.
        """
        if self._skips(token_id):
            return ""
        found = self._tokenizer.token_bytes(token_id, first=not self._begun)
        self._begun = self._begun or bool(self._tokenizer.token_bytes(token_id))
        if self._unfinished and found:
            if not _continues(self._unfinished, found):
                self._decoder.reset()
            self._unfinished = b""
        return self._decoder.decode(found)

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character that never became whole, or nothing."""
        if self._unfinished:
            self._unfinished = b""
            self._decoder.reset()
        return self._decoder.decode(b"", final=True)

    def _skips(self, token_id: int) -> bool:
        return self._skip_special and self._tokenizer.is_special(token_id)


def _continues(unfinished: bytes, found: bytes) -> bool:
    """Return whether the first byte belongs to the character that the others begin."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(unfinished + found[:1])
    except UnicodeDecodeError:
        return False
    return True


def _puts_space_first(backend: tokenizers.Tokenizer) -> bool:
    for part in (backend.normalizer, backend.pre_tokenizer):
        if part is not None:
            description = json.loads(part.__getstate__())
            if pieces.without_first_space(description) != description:
                return True
    return False
