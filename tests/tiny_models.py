"""Tiny random Hugging Face decoders of every architecture that attach serves or refuses."""

from __future__ import annotations

from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KV = {"num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**COMMON, **KV}),
    "mistral": ("MistralConfig", {**COMMON, **KV, "sliding_window": 6}),
    "qwen2": ("Qwen2Config", {**COMMON, **KV}),
    "qwen2-sliding": (
        "Qwen2Config",
        {**COMMON, **KV, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {**COMMON, **KV, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**COMMON, **KV, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {**COMMON, **KV, "head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3TextConfig", {**COMMON, **KV, "head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {**COMMON, **KV, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2Config", {**COMMON, **KV}),
    "granite": ("GraniteConfig", {**COMMON, **KV, "attention_multiplier": 0.3}),
    "smollm3": ("SmolLM3Config", {**COMMON, **KV, "no_rope_layer_interval": 2}),
    "llama4": (
        "Llama4TextConfig",
        {
            **COMMON, **KV, "head_dim": 8, "attention_chunk_size": 8, "intermediate_size_mlp": 48,
            "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "use_qk_norm": True,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", {**COMMON, "rotary_pct": 0.5}),
    "cohere": ("CohereConfig", {**COMMON, **KV}),
    "cohere2": ("Cohere2Config", {**COMMON, **KV, "head_dim": 8, "sliding_window": 6}),
    "glm": ("GlmConfig", {**COMMON, **KV, "head_dim": 8}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0},
    ),
    "opt": (
        "OPTConfig",
        {**COMMON, "num_hidden_layers": 2, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0},
    ),
    "bloom": ("BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0}),
    "mpt": ("MptConfig", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "deepseek": (
        "DeepseekV3Config",
        {
            **COMMON, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
            "v_head_dim": 8, "n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1,
            "topk_group": 1,
        },
    ),
}  # fmt: skip


def tiny(name: str, **changes: Any) -> Any:
    """A model in eval mode with weights large enough that positions matter."""
    import transformers

    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**options, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def logits(model: Any, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, **kwargs).logits
