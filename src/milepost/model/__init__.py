"""A small decoder language model that takes any encoding; a Hugging Face model in every respect.

    config = MilepostConfig(width=256, num_layers=4, num_heads=4, encoding="alibi:slope_scale=2")
    model = MilepostForCausalLM(config)
    model.generate(input_ids, max_new_tokens=20)

Importing this package registers it with ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from milepost.model.cache import BoundedCache, DecodingCache, bounded_cache
from milepost.model.config import MilepostConfig
from milepost.model.cross import CrossAttention
from milepost.model.decoder import Attention, Block, FeedForward, MilepostForCausalLM, MilepostModel

AutoConfig.register(MilepostConfig.model_type, MilepostConfig, exist_ok=True)
AutoModel.register(MilepostConfig, MilepostModel, exist_ok=True)
AutoModelForCausalLM.register(MilepostConfig, MilepostForCausalLM, exist_ok=True)

__all__ = [
    "Attention",
    "Block",
    "BoundedCache",
    "CrossAttention",
    "DecodingCache",
    "FeedForward",
    "MilepostConfig",
    "MilepostForCausalLM",
    "MilepostModel",
    "bounded_cache",
]
