"""Texts that tokenizers trip over: every script, emoji, code, control characters, long blanks."""

from __future__ import annotations

import functools
import random
import sys
import unicodedata
from collections.abc import Callable

EMOJI = (
    "👩‍👩‍👧‍👦 👨🏿‍🚀 🧑🏻‍🤝‍🧑🏾 🏳️‍🌈 🏴‍☠️ 🏴󠁧󠁢󠁳󠁣󠁴󠁿 🇩🇪 🇯🇵🇧🇷 🇩 1️⃣ #️⃣ ❤️‍🔥 ❤ ☺️ ☺︎ "
    "👋🏽 🫱🏼‍🫲🏿 🐈‍⬛ ⛹🏽‍♀️ 🧿 🪬 🙂 ©️ ™ "
).split(" ")[:-1]
WORDS = (
    "I'LL they've don't it's O'Neill 'tis we'Re ſ'ſ camelCaseWord "
    "HTTPServer snake_case kebab-case e.g. 3.14159 1,000,000 0xDEADBEEF "
    "12345678 ²³¹ ½ ٣٤٥ १२३ 五六七 Ⅻ naïve ß İstanbul ǅ ﬁ 한국어 ▁ ▁▁x <0x0A> Ġ "
    "Ċ � "
    "nai\u0308ve \u212b A\u030a \u1112\u1161\u11ab q\u0307\u0323 \u0344 "  # not NFC
    "\u200b \ufeff \u2028 \u00ad "
).split(" ")[:-1]
CODE = (
    "def f(x: int) -> str:\n    return f'{x!r}'\n",
    "for (int i = 0; i < n; ++i) { a[i] += 1; }\n",
    '<div class="a b">&nbsp;</div>\r\n',
    '{"key": [1, 2.5e-3, null, true]}\n',
    "SELECT * FROM t;\n",
    "\tif err != nil {\n\t\treturn err\n\t}\n",
    "#include <stdio.h>\n",
    "let x = a?.b ?? c;\n",
    "x = [\n        1,\n        2,\n]\n\n\n",
    "# --- === *** ###\n",
    "\\frac{a}{b} \\\\ $x^2$\n",
    "https://example.org/a?b=c&d=%20#e ",
    "rm -rf ./*; echo $?\n",
    "λ x → x ≤ y ∧ ¬z\n",
)
BLANKS = (" ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2003", "\v", "\f", "\u0085")
SIGNS = (".", "-", "=", "*", "_", "~", "/", "!", "?", "…", "—", "(", ")", "ー", "ha", "0", "\\")


def strings(count: int, seed: int = 0) -> list[str]:
    """Return different texts, the same for the same seed."""
    rng = random.Random(seed)
    makers: tuple[Callable[[random.Random], str], ...] = (
        _script,
        _emoji,
        _words,
        _code,
        _controls,
        _blanks,
        _signs,
        _anything,
        _mixture,
    )
    found = dict.fromkeys(["", " ", "  ", "\n", "a", " a", "a ", *EMOJI, *WORDS, *CODE, *BLANKS])
    for script in sorted(_scripts()):
        found[_of_script(rng, script)] = None
    turn = 0
    while len(found) < count:
        found[makers[turn % len(makers)](rng)] = None
        turn += 1
    return list(found)[:count]


@functools.cache
def _scripts() -> dict[str, list[str]]:
    """Letters, marks and digits by the first word of their names."""
    found: dict[str, list[str]] = {}
    for code in range(0x41, sys.maxunicode):
        char = chr(code)
        if unicodedata.category(char)[0] in "LMN":
            script = unicodedata.name(char, "UNNAMED").split(maxsplit=1)[0]
            found.setdefault(script.split("-")[0], []).append(char)
    return found


def _of_script(rng: random.Random, script: str) -> str:
    letters = _scripts()[script]
    words = ("".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 8)))
    return rng.choice((" ", " ", ", ", "")).join(words)


def _script(rng: random.Random) -> str:
    return _of_script(rng, rng.choice(sorted(_scripts())))


def _emoji(rng: random.Random) -> str:
    return rng.choice(("", " ")).join(rng.choices(EMOJI, k=rng.randint(1, 12)))


def _words(rng: random.Random) -> str:
    return rng.choice((" ", " ", "")).join(rng.choices(WORDS, k=rng.randint(1, 12)))


def _code(rng: random.Random) -> str:
    return "".join(rng.choice(("", "    ", "\t")) + line for line in rng.choices(CODE, k=4))


def _controls(rng: random.Random) -> str:
    codes = [*range(0x20), *range(0x7F, 0xA0), *range(0x200B, 0x2010), *range(0x202A, 0x202F)]
    count = rng.randint(1, 30)
    return "".join(rng.choice((chr(rng.choice(codes)), "a", " ")) for _ in range(count))


def _blanks(rng: random.Random) -> str:
    runs = (rng.choice(BLANKS) * rng.choice((1, 2, 3, 31, 33, 200, 1000)) for _ in range(3))
    return "".join(run + rng.choice(("", "word", "}", "1")) for run in runs)


def _signs(rng: random.Random) -> str:
    return "".join(
        rng.choice(SIGNS) * rng.randint(1, 90) + rng.choice(("", " ", "\n", "a")) for _ in range(3)
    )


def _anything(rng: random.Random) -> str:
    codes = (rng.choice((0x250, 0x3000, 0xD7FF, 0x10FFFF)) for _ in range(rng.randint(1, 40)))
    chars = (chr(rng.randint(0, code)) for code in codes)
    return "".join(char for char in chars if not 0xD800 <= ord(char) <= 0xDFFF)


def _mixture(rng: random.Random) -> str:
    makers = (_script, _emoji, _words, _code, _controls, _signs, _anything)
    return "".join(rng.choice(makers)(rng) for _ in range(rng.randint(2, 5)))
