"""In the place of `jaxstate.models.tokenizer` on machines without tokenizers: there is no text.

device_sources.py links this file; an engine that is given no tokenizer needs the names alone.
"""

from __future__ import annotations

from typing import Any


class Tokenizer:
    """Cannot be made."""

    def __init__(self, *args: Any):
        """Raises NotImplementedError."""
        raise NotImplementedError("tokenizer: this machine has none; ask with token ids")


class Detokenizer(Tokenizer):
    """Cannot be made."""
