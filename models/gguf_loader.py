"""Load a model from a GGUF file."""

from __future__ import annotations

import pathlib

import numpy as np
from jax.sharding import Mesh

from jaxstate.models import quantized, registry
from jaxstate.models.config import DtypePolicy, ModelConfig, Quantization
from jaxstate.models.families.base import Gguf
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.params import Params
from jaxstate.models.quantized import QuantizedMatrix, Weights
from jaxstate.models.weights import assemble


def load_gguf(
    source: GgufFile | str | pathlib.Path,
    *,
    dtypes: DtypePolicy | None = None,
    weights: Weights | Quantization = "float",
    mesh: Mesh | None = None,
) -> tuple[ModelConfig, Params]:
    """Read configuration and weights.

    Args:
      source: path, or a file already opened.
      dtypes: f32 throughout if None; weights are cast to its param_dtype.
      weights: "stored" keeps tensors in the file's own few bits where their encoding has a form
        for it (see gguf_codes), and dequantizes the others.
      mesh: devices that weights go to as they are read; None = the default one.
    Returns:
      The configuration, and the tree of param_specs(config).
    Raises:
      FileNotFoundError: nothing is there.
      ValueError: the file is no GGUF file, damaged, of an unknown family, asks for a feature that
        is not supported, or its tensors do not fit its configuration.
    """
    file = source if isinstance(source, GgufFile) else GgufFile(source)
    form = _format(file)
    config = form.config(file, dtypes or DtypePolicy())

    def read(name: str) -> np.ndarray | QuantizedMatrix:
        if weights == "stored" and (stored := file.read_codes(name)) is not None:
            return stored
        # Vectors stay f32 until they are in memory: families add to norms.
        is_vector = len(file.tensors[name].shape) == 1
        return file.read(name, np.float32 if is_vector else config.dtypes.param_dtype)

    return assemble(
        config, form.layout, shapes=file.shapes, read=read, origin=str(file.path),
        form=quantized.form_of(weights), mesh=mesh,
    )  # fmt: skip


def read_config(file: GgufFile, dtypes: DtypePolicy) -> ModelConfig:
    """Read the configuration alone; see load_gguf for errors."""
    return _format(file).config(file, dtypes)


def _format(file: GgufFile) -> Gguf:
    return registry.gguf_format(file.fields.text("general.architecture"))
