"""A model in memory with everything that belongs to it."""

from __future__ import annotations

import dataclasses

from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params
from jaxstate.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to run.

    Attributes:
      config: sizes and dtypes.
      params: the tree of param_specs(config).
      tokenizer: text to ids and back.
      name: name of the file without its suffix, or of the directory.
      fingerprint: see `loading.fingerprint`; equal means interchangeable, also for saved keys and
        values.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    name: str
    fingerprint: str
