"""Decoder families, their weights and their tokenizers; knows nothing of sessions."""

from jaxstate.models import chat_template, plain_forward, sources
from jaxstate.models.checkpoint import save_checkpoint
from jaxstate.models.config import DtypePolicy, ExpertConfig, LayerConfig, ModelConfig
from jaxstate.models.decoder import Attend, forward, logits
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.gguf_loader import load_gguf
from jaxstate.models.layers import rotate
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.models.loading import load
from jaxstate.models.params import (
    Params,
    ParamSpec,
    abstract_params,
    check_params,
    init_params,
    map_specs,
    num_params,
    param_specs,
)
from jaxstate.models.rope import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)
from jaxstate.models.safetensors_loader import load_safetensors
from jaxstate.models.sharding import Sharding, place
from jaxstate.models.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "Attend",
    "Detokenizer",
    "DtypePolicy",
    "ExpertConfig",
    "FactorScaling",
    "GgufFile",
    "LayerConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LoadedModel",
    "ModelConfig",
    "ParamSpec",
    "Params",
    "RopeConfig",
    "Sharding",
    "Tokenizer",
    "YarnScaling",
    "abstract_params",
    "chat_template",
    "check_params",
    "forward",
    "init_params",
    "load",
    "load_gguf",
    "load_safetensors",
    "logits",
    "map_specs",
    "num_params",
    "param_specs",
    "place",
    "plain_forward",
    "rotate",
    "save_checkpoint",
    "sources",
]
