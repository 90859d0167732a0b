"""Bars of the text layer: both formats encode alike, streamed text equals the whole.

    python bench/text_checks.py [--gguf-dir DIR] [--out FILE]

DIR holds GGUF files, and for NAME.gguf a folder NAME with the tokenizer.json that the model was
published with. SmolLM2 is always checked, against a tokenizer.json written here from the tables of
its file and the published pre-tokenizer, which proves less.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import tempfile
from typing import Any

import text_strings
import tokenizers
from common import Limit, Report

from jaxstate.models import sources
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.tokenizer import Detokenizer, Tokenizer

NUM_STRINGS = 2_000
NUM_SEQUENCES = 10_000
LONGEST = 48

SMOLLM2 = "smollm2-135m"
NONE = Limit(op="==", value=0)

Found = tuple[int, int, dict[str, Any]]
"""What was measured, of how many, and what it was made of."""


def bars(report: Report, directory: pathlib.Path | None, *, quick: bool) -> None:
    """Write both bars, over SmolLM2 and, unless quick, over what lies in the directory."""
    smollm2 = sources.pull(SMOLLM2)
    ggufs = [] if directory is None or quick else sorted(directory.glob("*.gguf"))
    with tempfile.TemporaryDirectory() as temporary:
        written = pathlib.Path(temporary) / "written from the file's own tables"
        written.mkdir()
        (written / "tokenizer.json").write_text(json.dumps(smollm2_json(smollm2)))
        pairs = [(smollm2, written)]
        pairs += [(gguf, gguf.with_suffix("")) for gguf in ggufs]
        pairs = [pair for pair in pairs if (pair[1] / "tokenizer.json").is_file()]
        equal = [text_equal(*pair) for pair in pairs]
        streams = {gguf.name: Tokenizer.from_gguf(gguf) for gguf in (smollm2, *ggufs)}
        streams |= {folder.name: Tokenizer.from_hf_dir(folder) for _, folder in pairs}
    _bar(report, "text.equal", equal, "strings that differ")
    _bar(
        report,
        "text.stream",
        [text_stream(*pair) for pair in streams.items()],
        "streams that differ",
    )


def _bar(report: Report, name: str, found: list[Found], unit: str) -> None:
    report.bar(
        name,
        sum(measured for measured, _, _ in found),
        NONE,
        unit=unit,
        n=sum(n for _, n, _ in found),
        parts=[{"measured": measured, "n": n, **detail} for measured, n, detail in found],
    )


def smollm2_json(gguf: pathlib.Path) -> dict[str, Any]:
    """Return SmolLM2's tokenizer.json: the tables of its file in the form it was published in."""
    metadata = GgufFile(gguf).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level |= {"use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": idx, "content": token, "special": True, **flags}
            for idx, token in enumerate(tokens[:17])
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: idx for idx, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def text_equal(gguf: pathlib.Path, directory: pathlib.Path) -> Found:
    """Count strings that differ between a GGUF file's tokenizer and a tokenizer.json.

    The tokenizer.json is read by the tokenizers library alone. Ids must be equal with control
    tokens parsed and with them as plain text, and so must the text that is read back from them.
    """
    ours = Tokenizer.from_gguf(gguf)
    path = str(directory / "tokenizer.json")
    theirs, plain = (tokenizers.Tokenizer.from_file(path) for _ in range(2))
    plain.encode_special_tokens = True
    strings = text_strings.strings(NUM_STRINGS)
    differ = []
    for text in strings:
        ids = theirs.encode(text, add_special_tokens=False).ids
        same = (
            ours.encode(text) == ids
            and ours.encode(text, parse_special=False)
            == plain.encode(text, add_special_tokens=False).ids
            and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
        )
        if not same:
            differ.append(text)
    detail = {
        "gguf": gguf.name,
        "tokenizer_json": directory.name,
        "characters": sum(map(len, strings)),
        "differ": [text[:60] for text in differ[:5]],
    }
    return len(differ), len(strings), detail


def text_stream(name: str, tokenizer: Tokenizer) -> Found:
    """Count random id sequences whose streamed pieces do not join to the text of all ids.

    A third of the ids are pieces of characters, where tokenizers have such. Each sequence is also
    cut in two, and the second part streamed behind the first as its context.
    """
    rng = random.Random(0)
    ids = range(tokenizer.vocab_size + 8)
    partial = [idx for idx in ids if not _is_text(tokenizer.token_bytes(idx))] or list(ids)
    differ = []
    for _ in range(NUM_SEQUENCES):
        sequence = [
            rng.choice(partial) if rng.random() < 1 / 3 else rng.choice(ids)
            for _ in range(rng.randint(0, LONGEST))
        ]
        skip = rng.random() < 0.5
        whole = tokenizer.decode(sequence, skip_special=skip)
        cut = rng.randint(0, len(sequence))
        first = Detokenizer(tokenizer, skip_special=skip)
        before = "".join(map(first.push, sequence[:cut]))
        behind = streamed(tokenizer, sequence[cut:], sequence[:cut], skip)
        # A character that the context began and nothing continued is shown with neither part.
        parts = (before + behind, before + first.finish() + behind)
        if streamed(tokenizer, sequence, (), skip) != whole or whole not in parts:
            differ.append(sequence)
    detail = {"tokenizer": name, "partial_tokens": len(partial), "differ": differ[:2]}
    return len(differ), NUM_SEQUENCES, detail


def streamed(tokenizer: Tokenizer, ids: list[int], context: Any, skip_special: bool) -> str:
    """Join the pieces of a stream."""
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special, context=context)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def _is_text(found: bytes) -> bool:
    try:
        found.decode()
    except UnicodeDecodeError:
        return False
    return True


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="Checks of tokenizers.")
    parser.add_argument("--gguf-dir", type=pathlib.Path, help="GGUF files and tokenizer.json")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    command = "python bench/text_checks.py" + (" --gguf-dir DIR" if args.gguf_dir else "")
    report = Report("text", command=command, quick=False, path=args.out)
    bars(report, args.gguf_dir, quick=False)
    report.table()


if __name__ == "__main__":
    main()
