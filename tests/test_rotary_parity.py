"""The rotary family against code that others wrote, run side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from milepost import Positions, build
from milepost.encodings.axial import MRoPE
from milepost.encodings.rotary import RoPE, Rotary, permute_projection
from milepost.encodings.xpos import XPos

CLOSE = {"atol": 2e-6, "rtol": 2e-6}


def turned(encoding: object, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
    (branch,) = encoding(positions).branches  # type: ignore[operator]
    return branch.query(q), branch.key(k, at="keys")


def heads(length: int, head_dim: int, kv: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4, length, head_dim), torch.randn(2, kv, length, head_dim)


def test_llama_is_the_half_layout() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=512)
    q, k = heads(37, 16)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(37)[None])
    for mine, theirs in zip(
        turned(RoPE(head_dim=16), q, k, Positions.full(37)), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + i for i in range(8)],
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    ],
    ids=lambda block: block["rope_type"],
)
def test_every_rope_type_of_transformers_runs_through_rope(block: dict[str, object]) -> None:
    """Beyond the trained length, attention factors included; each row of ours reads its own length."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    parameters = {"rope_theta": 10000.0, **block}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_parameters=dict(parameters)
    )
    encoding = RoPE(head_dim=16, trained_length=64, scaling=parameters)
    q, k = heads(150, 16)
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(q, torch.arange(150)[None])
    for mine, theirs in zip(
        turned(encoding, q, k, Positions.full(150)), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=3e-5)
    assert encoding(Positions.full(150)).rotated_keys_cacheable == (block["rope_type"] not in ("dynamic", "longrope"))


@pytest.mark.parametrize("model", ["cohere", "glm"])
def test_cohere_and_glm_are_interleaved(model: str) -> None:
    from transformers import CohereConfig, GlmConfig
    from transformers.models.cohere import modeling_cohere
    from transformers.models.glm import modeling_glm

    q, k = heads(29, 16)
    if model == "cohere":
        config = CohereConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
        cos, sin = modeling_cohere.CohereRotaryEmbedding(config)(q, torch.arange(29)[None])
        theirs = modeling_cohere.apply_rotary_pos_emb(q, k, cos, sin)
        encoding = RoPE(head_dim=16, base=config.rope_parameters["rope_theta"], layout="interleaved")
    else:
        config = GlmConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        cos, sin = modeling_glm.GlmRotaryEmbedding(config)(q, torch.arange(29)[None])
        theirs = modeling_glm.apply_rotary_pos_emb(q, k, cos, sin)
        partial = config.rope_parameters["partial_rotary_factor"]
        encoding = RoPE(head_dim=16, base=config.rope_parameters["rope_theta"], partial=partial, layout="interleaved")
        assert encoding.config.rotary_dim == 8
    for mine, other in zip(turned(encoding, q, k, Positions.full(29)), theirs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


def test_llama4_rotates_pairs_and_heats_its_global_layers() -> None:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding, apply_rotary_emb

    config = Llama4TextConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=8)
    q, k = heads(21, 16)
    freqs = Llama4TextRotaryEmbedding(config)(q, torch.arange(21)[None])
    theirs = [x.transpose(1, 2) for x in apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), freqs)]
    schedule = build("irope", head_dim=16, base=config.rope_parameters["rope_theta"], chunk=8192)
    for mine, other in zip(turned(schedule.for_layer(0), q, k, Positions.full(21)), theirs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)
    rotates = [isinstance(schedule.for_layer(n), Rotary) for n in range(config.num_hidden_layers)]
    assert rotates == [bool(flag) for flag in config.no_rope_layers]  # the name says the opposite of its value
    place = torch.tensor([[0, 8190, 8191, 16383, 131071]])
    positions = Positions.cross(5, 5).mapped(place, place)
    (branch,) = build("nope-llama4")(positions).branches
    scales = torch.log1p(torch.floor((place.float() + 1.0) / config.floor_scale)) * config.attn_scale + 1.0
    ones = torch.ones(1, 1, 5, 4)
    torch.testing.assert_close(branch.query(ones)[0, 0, :, 0], scales[0], **CLOSE)


@pytest.mark.parametrize("interleaved", [False, True], ids=["qwen2-vl", "qwen3-vl"])
def test_m_rope_sections(interleaved: bool) -> None:
    from transformers import Qwen2VLConfig, Qwen3VLTextConfig
    from transformers.models.qwen2_vl import modeling_qwen2_vl
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    length, sections = 23, (4, 6, 6) if not interleaved else (6, 5, 5)
    q, k = heads(length, 32)
    ids = torch.stack([torch.arange(length), torch.arange(length) % 5, torch.arange(length) // 3])[:, None]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    if interleaved:
        config = Qwen3VLTextConfig(
            hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_parameters=rope
        )
        cos, sin = modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding(config)(q, ids)
    else:
        config = Qwen2VLConfig(
            text_config={
                "hidden_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": rope,
            }
        ).text_config
        cos, sin = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(config)(q, ids)
    theirs = (
        modeling_qwen2_vl.apply_rotary_pos_emb(q, k, cos, sin)
        if hasattr(modeling_qwen2_vl, "apply_rotary_pos_emb")
        else modeling_qwen3_vl.apply_rotary_pos_emb(q, k, cos, sin)
    )
    where = ids[:, 0].T[None]
    positions = Positions.full(length).mapped(where, where)
    encoding = MRoPE(head_dim=32, sections=sections, interleaved=interleaved)
    for mine, other in zip(turned(encoding, q, k, positions), theirs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("name", ["rope", "xpos"])
def test_x_transformers(name: str) -> None:
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    q, k = heads(33, 16, kv=4)
    freqs, scale = RotaryEmbedding(16, use_xpos=name == "xpos").forward_from_seq_len(33)
    inverse = scale**-1 if name == "xpos" else 1.0
    theirs_q = apply_rotary_pos_emb(q, freqs, scale)
    theirs_k = apply_rotary_pos_emb(k, freqs, inverse)
    encoding = build(name, head_dim=16, layout="interleaved")
    mine_q, mine_k = turned(encoding, q, k, Positions.full(33))
    # Centres differ by half a position, which cancels in the product.
    torch.testing.assert_close(mine_q @ mine_k.mT, theirs_q @ theirs_k.mT, atol=2e-5, rtol=2e-5)


def test_torchscale_xpos() -> None:
    reason = "torchscale pins old versions of its other dependencies; install it with --no-deps to run this"
    module = pytest.importorskip("torchscale.component.xpos_relative_position", reason=reason)
    q, k = heads(33, 16, kv=4)
    theirs = module.XPOS(16)
    theirs_q = theirs(q.flatten(0, 1), downscale=False).view_as(q)
    theirs_k = theirs(k.flatten(0, 1), downscale=True).view_as(k)
    mine_q, mine_k = turned(XPos(head_dim=16), q, k, Positions.full(33))
    torch.testing.assert_close(mine_q @ mine_k.mT, theirs_q @ theirs_k.mT, atol=2e-5, rtol=2e-5)


def test_permuted_projections_change_the_layout_and_no_score() -> None:
    x = torch.randn(2, 9, 64)
    wq, wk = torch.randn(64, 64), torch.randn(32, 64)
    scores = []
    for layout in ("interleaved", "half"):
        move = {"head_dim": 16, "rotary_dim": 8, "to": "half"}
        a = wq if layout == "interleaved" else permute_projection(wq, **move)  # type: ignore[arg-type]
        b = wk if layout == "interleaved" else permute_projection(wk, **move)  # type: ignore[arg-type]
        q = (x @ a.T).unflatten(-1, (4, 16)).transpose(1, 2)
        k = (x @ b.T).unflatten(-1, (2, 16)).transpose(1, 2)
        encoding = build("rope", head_dim=16, partial=0.5, layout=layout)
        q, k = turned(encoding, q, k, Positions.full(9))
        scores.append(q @ k.repeat_interleave(2, 1).mT)
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-5)
    back = permute_projection(permute_projection(wq, head_dim=16, to="half"), head_dim=16, to="interleaved")
    assert torch.equal(back, wq)
    with pytest.raises(ValueError, match="multiple of head_dim"):
        permute_projection(wq[:30], head_dim=16, to="half")
