"""Bars of the text layer: both formats encode alike, streamed text equals the whole.

    python bench/text_checks.py [--pair GGUF DIR]… [--out FILE]

Each pair is a GGUF file and a directory with the tokenizer.json of the same model, from another
source than the file. Streaming is checked on every tokenizer named, and on SmolLM2's.
"""

from __future__ import annotations

import argparse
import pathlib
import random
from typing import Any

import text_strings
import tokenizers
from common import Limit, Report

from jaxstate.models import sources
from jaxstate.models.tokenizer import Detokenizer, Tokenizer

NUM_STRINGS = 2_000
NUM_SEQUENCES = 10_000
LONGEST = 48

EQUAL = Limit(op="==", value=0)
STREAM = Limit(op="==", value=0)

Found = tuple[int, int, dict[str, Any]]
"""What was measured, of how many, and what it was made of."""


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


def text_stream(tokenizer: Tokenizer, name: str) -> Found:
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
    parser.add_argument(
        "--pair",
        nargs=2,
        action="append",
        default=[],
        type=pathlib.Path,
        metavar=("GGUF", "DIR"),
        help="a GGUF file, and a directory with the same model's tokenizer.json",
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    command = "python bench/text_checks.py" + " --pair GGUF DIR" * len(args.pair)
    report = Report("text", command=command, quick=False, path=args.out)
    if not args.pair:
        report.no_bar("text.equal", EQUAL, unit="strings that differ", reason="no --pair was given")
    for gguf, directory in args.pair:
        measured, n, detail = text_equal(gguf, directory)
        report.bar("text.equal", measured, EQUAL, unit="strings that differ", n=n, **detail)
    smollm2 = sources.pull("smollm2-135m")
    streams = {smollm2.name: Tokenizer.from_gguf(smollm2)}
    for gguf, directory in args.pair:
        streams[gguf.name] = Tokenizer.from_gguf(gguf)
        streams[directory.name] = Tokenizer.from_hf_dir(directory)
    for name, tokenizer in streams.items():
        measured, n, detail = text_stream(tokenizer, name)
        report.bar("text.stream", measured, STREAM, unit="streams that differ", n=n, **detail)
    report.table()


if __name__ == "__main__":
    main()
