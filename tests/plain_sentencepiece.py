"""A tiny SentencePiece vocabulary, and BPE with scores, the slow and plain way."""

from __future__ import annotations

PIECES = (
    # In the order of their scores; runs of blanks come last, with one score for all.
    "▁a ab ▁ab aba == ==== ▁== === ba ▁ba bab a. é ha haha ▁ a b = . h ( < > s / <s "
    "▁▁ ▁▁▁ ▁▁▁▁ ▁▁▁▁▁▁▁▁"
).split()
_BLANKS_SCORE = -1e9


def tokens() -> tuple[list[str], list[int], list[float]]:
    """Tokens, token types and scores, in the manner of Llama 2's file."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 259
    scores += [
        _BLANKS_SCORE if len(piece) > 1 and set(piece) == {"▁"} else -float(rank + 1)
        for rank, piece in enumerate(PIECES)
    ]
    return names, types, scores


def metadata(*, add_space_prefix: bool | None = None) -> dict:
    """Describe the vocabulary as GGUF metadata does."""
    names, types, scores = tokens()
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if add_space_prefix is not None:
        values["tokenizer.ggml.add_space_prefix"] = add_space_prefix
    return values


def encode(text: str, *, add_space_prefix: bool = True) -> list[int]:
    """Merge the leftmost of the pairs that form the best piece, while there is one.

    Source: SentencePiece (arXiv:1808.06226), BPE segmentation.
    """
    names, types, scores = tokens()
    ids = {name: idx for idx, name in enumerate(names) if types[idx] == 1}
    text = text.replace(" ", "▁")
    parts = list(f"▁{text}" if add_space_prefix and text else text)
    while True:
        pairs = [left + right for left, right in zip(parts, parts[1:], strict=False)]
        known = [scores[ids[pair]] if pair in ids else float("-inf") for pair in pairs]
        best = max(known, default=float("-inf"))
        if best == float("-inf"):
            break
        where = known.index(best)
        parts[where : where + 2] = [pairs[where]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [byte + 3 for byte in part.encode()]
    return found


def tokenizer_json(*, legacy: bool = True) -> dict:
    """The same as the contents of a tokenizer.json, without merges.

    Legacy ones put a space before every stretch of text, others only where the text begins.
    """
    names = tokens()[0]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": idx, "content": names[idx], "special": True, **flags} for idx in range(3)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, blank]} if legacy else None,
        "pre_tokenizer": None if legacy else metaspace | {"split": False},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {name: idx for idx, name in enumerate(names)},
            "merges": [],
        },
    }
