"""What transformers' classes say where a file does not: widths, rotated shares, bases, and how they read a rope block.

Every table is compared with the installed transformers 5.24 in the tests.
"""

from __future__ import annotations

from typing import NamedTuple

HEAD_DIMS: dict[str, int] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3n_text", "vaultgemma"), 256),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 256),
    **dict.fromkeys(("qwen3", "qwen3_vl_text", "glm", "glm4", "helium", "llama4_text", "ministral3", "seed_oss"), 128),
    **dict.fromkeys(("ernie4_5", "minimax_m2", "cwm", "solar_open", "hy_v3", "internlm3"), 128),
    "gpt_oss": 64,
}
"""Head widths of classes that do not take hidden_size / num_attention_heads where head_dim is missing."""

PARTIALS: dict[str, float] = {
    **dict.fromkeys(("gpt_neox", "stablelm", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 0.25),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "glm4v_moe_text", "nemotron", "persimmon", "phi"), 0.5),
}
"""Rotated shares of classes that rotate a part of the head where the file says nothing."""

THETAS: dict[str, float] = {
    **dict.fromkeys(("cohere", "csm", "ernie4_5", "ernie4_5_moe", "exaone", "flex_olmo", "llama4_text"), 500000.0),
    **dict.fromkeys(("mllama_text_model", "olmo3", "qwen3_vl_text", "qwen3_vl_moe_text", "bitnet"), 500000.0),
    **dict.fromkeys(("gemma3_text", "gemma3n_text", "mixtral", "phimoe", "lfm2", "lfm2_moe", "cwm", "minimax"), 1e6),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_omni_moe_text"), 1e6),
    **{"helium": 1e5, "smollm3": 2e6, "minimax_m2": 5e6, "apertus": 1.2e7, "gpt_oss": 150000.0, "nomic_bert": 1000.0},
    **dict.fromkeys(("modernbert", "modernbert-decoder"), 160000.0),
}
"""Bases of classes that take another one than 10000 where the file states none."""

ORIGINALS: dict[str, int] = {"phi3": 4096, "phi4_multimodal": 4096}
"""Classes with an original length of their own, which wins over the block's unless the top level states one."""

MROPE = frozenset({"qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"})
"""Classes that take rope type "mrope" for "default"."""

SU = frozenset({"phi3", "phi4_multimodal"})
"""Classes that take rope types "su" and "yarn" for "longrope"."""

ALPHA = frozenset({"hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl", "hunyuan_vl_text"})
"""Classes that read alpha of a dynamic block: a base of theta * alpha ^ (d / (d - 2))."""

IGNORES_PARTIAL = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
        *("olmo", "olmo2", "olmo3", "granite", "smollm3", "cohere", "cohere2", "gpt_oss", "starcoder2", "ministral3"),
    }
)
"""Model types whose class in transformers 5.24 rotates the whole head whatever partial_rotary_factor says."""

NULL_HEAD_DIM_STOPS = frozenset(
    {
        *("mixtral", "qwen2", "qwen2_moe", "qwen3_moe", "phi3", "phimoe", "granite", "olmo", "olmo2", "smollm3"),
        *("cohere", "cohere2", "stablelm", "phi", "gpt_neox", "persimmon", "exaone4", "glm"),
    }
)
"""Classes that keep head_dim: null, and whose yarn, dynamic and longrope then multiply None."""

FLAT_ONLY = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "phi", "phi3"),
        *("olmo", "olmo2", "granite", "smollm3", "cohere", "cohere2", "gpt_oss", "starcoder2", "gpt_neox", "stablelm"),
        *("glm", "glm4", "falcon", "persimmon", "deepseek_v2", "deepseek_v3", "llama4_text"),
    }
)
"""Classes whose rotary module reads one flat block: blocks per layer type are not read, or stop it."""


class Layered(NamedTuple):
    """How a class makes blocks per layer type of a file that has none.

    ``full`` and ``sliding``: (key of the base, base where it is missing). ``both``: whether rope_scaling scales the
    sliding layers too.
    """

    full: tuple[str, float]
    sliding: tuple[str, float]
    both: bool = False


_GEMMA = Layered(("rope_theta", 1e6), ("rope_local_base_freq", 1e4))
_MODERNBERT = Layered(("global_rope_theta", 160000.0), ("local_rope_theta", 1e4), both=True)
LAYERED: dict[str, Layered] = {
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), _GEMMA),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), _MODERNBERT),
    "olmo3": Layered(("rope_theta", 500000.0), ("rope_theta", 500000.0)),
}
"""Classes that read rope_scaling into blocks per layer type, and never a flat rope_parameters."""
