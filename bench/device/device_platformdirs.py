"""What of `platformdirs` an engine calls, for machines that have only jax, numpy and flax.

device_sources.py links this file as `platformdirs` where the real one is not installed.
"""

from __future__ import annotations

import pathlib
import tempfile


def user_cache_path(name: str) -> pathlib.Path:
    """Return a folder that may be deleted at any time."""
    return pathlib.Path(tempfile.gettempdir()) / name
