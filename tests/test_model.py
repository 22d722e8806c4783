"""The language model: Hugging Face's contract, block options, cross-attention, generation, lm-eval."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from milepost.encoding import Encoding, build
from milepost.model import Block, CrossAttention, MilepostConfig, MilepostForCausalLM, MilepostModel
from milepost.positions import Positions
from milepost.terms import Terms


def make(encoding: str = "rope", **options: Any) -> MilepostForCausalLM:
    torch.manual_seed(0)
    sizes = {"width": 32, "num_layers": 2, "num_heads": 4, "trained_length": 64, "initializer_range": 0.2}
    return MilepostForCausalLM(MilepostConfig(encoding=encoding, **{**sizes, **options})).eval()


def tokens(batch: int = 2, length: int = 17) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


# ---- configuration ----


def test_configuration_takes_the_names_of_the_field_and_of_hugging_face() -> None:
    ours = MilepostConfig(width=48, num_layers=3, num_heads=6, num_kv_heads=2, trained_length=99)
    theirs = MilepostConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=99
    )
    assert ours.to_dict() == theirs.to_dict()
    assert (ours.head_dim, ours.width, ours.trained_length) == (8, 48, 99)
    assert isinstance(AutoConfig.for_model("milepost", width=8, num_heads=2), MilepostConfig)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 30, "num_heads": 4}, "width 30 does not divide into 4 heads"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads divides num_heads 4; got 3"),
        ({"norm": "batch", "block": "middle"}, "block is one of .*'middle'; norm is one of .*'batch'"),
        ({"dropout": 1.5}, r"dropout is in \[0, 1\); got 1.5"),
        ({"num_layers": 0}, "num_hidden_layers is at least 1; got 0"),
    ],
)
def test_impossible_configurations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MilepostConfig(**options)


def test_a_mistyped_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="no option 'encodign'; did you mean 'encoding'"):
        MilepostConfig(encodign="alibi")


# ---- encodings in layers ----


def test_encodings_are_shared_as_published_and_by_choice() -> None:
    for encoding, share, count in [
        ("kerple-log", None, 1),
        ("kerple-log", False, 3),
        ("shaw", None, 3),
        ("shaw", True, 1),
        ("sinusoidal", False, 1),
        ("rope/rope/nope", None, 2),
        ("sinusoidal+shaw", None, 4),
    ]:
        model = make(encoding, share_encoding=share, num_layers=3)
        assert len(model.model.encodings) == count, (encoding, share)
        assert len(model.model.schedule) == 3


def test_own_encodings_of_layers_start_from_different_draws() -> None:
    first, second = (dict(e.named_parameters()) for e in make("fire").model.encodings)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_terms_are_computed_once_for_each_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = Encoding.forward

    def counted(self: Encoding, positions: Positions, tokens: Tensor | None = None) -> Terms:
        calls.append(self.name)
        return original(self, positions, tokens)

    model = make("alibi/alibi/rope", num_layers=6)
    monkeypatch.setattr(Encoding, "forward", counted)
    model(tokens())
    assert sorted(calls) == ["alibi", "rope"]


def test_a_schedule_gives_each_layer_its_own_encoding() -> None:
    """NoPE in every layer but the second: moving all keys by one changes nothing in the first layer only."""
    model = make("nope/alibi")
    terms = model.model.terms(Positions.full(5))
    assert terms[0].is_empty() and not terms[1].is_empty()


def test_a_sum_in_the_model_is_both_encodings() -> None:
    ids = tokens()
    model = make("rope+alibi")
    for name in ("rope", "alibi"):
        other = make(name)
        other.load_state_dict(model.state_dict(), strict=False)
        assert (other(ids).logits - model(ids).logits).abs().max() > 1e-3


def test_set_encoding_changes_frequencies_and_keeps_parameters() -> None:
    ids, model = tokens(), make("fope:base=10000")
    before = list(model.model.encodings.parameters())
    old = model(ids).logits
    model.model.set_encoding("fope:base=500")
    assert all(a is b for a, b in zip(before, model.model.encodings.parameters(), strict=True))
    assert (model(ids).logits - old).abs().max() > 1e-3
    assert model.config.encoding == "fope:base=500"
    with pytest.raises(ValueError, match="'alibi:learn_slopes=True' has other parameters than"):
        model.model.set_encoding("alibi:learn_slopes=True")


def test_initialisation_is_normal_and_scaled_into_the_residual_stream() -> None:
    torch.manual_seed(0)
    model = MilepostForCausalLM(MilepostConfig(width=128, num_layers=8, num_heads=4))
    block = model.model.layers[3]
    for weight, std in [
        (model.model.embed_tokens.weight, 0.02),
        (block.attention.qkv_proj.weight, 0.02),
        (block.feed_forward.up_proj.weight, 0.02),
        (block.attention.o_proj.weight, 0.02 / math.sqrt(16)),
        (block.feed_forward.down_proj.weight, 0.02 / math.sqrt(16)),
    ]:
        assert abs(float(weight.detach().std()) / std - 1) < 0.05
    loss = model(tokens(), labels=tokens()).loss
    assert abs(float(loss.detach()) - math.log(258)) < 0.1


# ---- block options ----


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_a_post_block_is_torchs_encoder_layer(padded: bool) -> None:
    """post-norm, ReLU, bidirectional, layer norm, biases = torch.nn.TransformerEncoderLayer."""
    config = MilepostConfig(
        width=24, num_layers=1, num_heads=3, inner_width=40, block="post", norm="layer", activation="relu", bias=True,
        causal=False, encoding="nope", initializer_range=0.3,
    )  # fmt: skip
    model = MilepostModel(config).double().eval()
    block = model.layers[0]
    theirs = nn.TransformerEncoderLayer(24, 3, 40, dropout=0.0, activation="relu", batch_first=True).double().eval()
    for name, parameter in {
        "self_attn.in_proj_weight": block.attention.qkv_proj.weight,
        "self_attn.in_proj_bias": block.attention.qkv_proj.bias,
        "self_attn.out_proj.weight": block.attention.o_proj.weight,
        "self_attn.out_proj.bias": block.attention.o_proj.bias,
        "linear1.weight": block.feed_forward.up_proj.weight,
        "linear1.bias": block.feed_forward.up_proj.bias,
        "linear2.weight": block.feed_forward.down_proj.weight,
        "linear2.bias": block.feed_forward.down_proj.bias,
    }.items():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
        theirs.get_parameter(name).copy_(parameter)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.long)
    if padded:
        mask[0, 6:] = 0
    ours = model(inputs_embeds=x, attention_mask=mask).last_hidden_state
    expected = theirs(x, src_key_padding_mask=mask == 0)
    torch.testing.assert_close(ours[mask == 1], expected[mask == 1], atol=1e-12, rtol=0)


@torch.no_grad()
def test_one_head_with_identity_output_is_the_surveys_encoder() -> None:
    """Zhao et al. 2023 (arXiv 2312.17044), equations 1-5, written out query by query."""
    d, inner, length = 6, 10, 7
    config = MilepostConfig(
        width=d, num_layers=1, num_heads=1, inner_width=inner, block="post", activation="relu", bias=True, causal=False,
        encoding="nope",
    )  # fmt: skip
    block = Block(config, 0).double().eval()
    for parameter in block.parameters():
        parameter.copy_(torch.randn_like(parameter))
    block.attention.o_proj.weight.copy_(torch.eye(d))
    block.attention.o_proj.bias.zero_()
    x = torch.randn(length, d, dtype=torch.float64)

    def layer_norm(row: Tensor, norm: nn.LayerNorm) -> Tensor:
        mean = row.sum() / d
        variance = ((row - mean) ** 2).sum() / d
        return (row - mean) / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias

    weight, bias = block.attention.qkv_proj.weight, block.attention.qkv_proj.bias
    up, down = block.feed_forward.up_proj, block.feed_forward.down_proj
    rows = []
    for i in range(length):
        q = weight[:d] @ x[i] + bias[:d]
        scores = []
        for j in range(length):
            k = weight[d : 2 * d] @ x[j] + bias[d : 2 * d]
            scores.append(float(q @ k) / math.sqrt(d))
        total = sum(math.exp(score) for score in scores)
        o = torch.zeros(d, dtype=torch.float64)
        for j in range(length):
            v = weight[2 * d :] @ x[j] + bias[2 * d :]
            o = o + math.exp(scores[j]) / total * v
        a = layer_norm(o + x[i], block.norm1)
        f = down.weight @ torch.clamp(up.weight @ a + up.bias, min=0) + down.bias
        rows.append(layer_norm(f + a, block.norm2))
    ours = block(x[None], Positions.full(length, causal=False), Terms())
    torch.testing.assert_close(ours[0], torch.stack(rows), atol=1e-12, rtol=0)


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("block", ["pre", "post"])
@torch.no_grad()
def test_every_kind_of_block_is_causal(activation: str, norm: str, block: str) -> None:
    model, ids = make(activation=activation, norm=norm, block=block, bias=True), tokens()
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 7) % 256
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().min() > 0


@torch.no_grad()
def test_grouped_heads_equal_repeated_ones() -> None:
    grouped, full = make("alibi", num_kv_heads=2), make("alibi")
    state = grouped.state_dict()
    for layer in range(2):
        name = f"model.layers.{layer}.attention.qkv_proj.weight"
        q, k, v = state[name].split([32, 16, 16])
        k, v = (x.view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32) for x in (k, v))
        state[name] = torch.cat([q, k, v])
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()).logits, full(tokens()).logits, atol=1e-5, rtol=1e-5)


# ---- Hugging Face's contract ----


@torch.no_grad()
def test_loss_is_the_mean_over_shifted_labels() -> None:
    model, ids = make(), tokens()
    labels = ids.clone()
    labels[0, :5] = -100
    out = model(ids, labels=labels)
    logprobs = out.logits.log_softmax(-1)
    picked = [logprobs[b, t - 1, ids[b, t]] for b in range(2) for t in range(1, 17) if labels[b, t] != -100]
    torch.testing.assert_close(out.loss, -torch.stack(picked).mean())
    counted = model(ids, labels=labels, num_items_in_batch=10).loss
    torch.testing.assert_close(counted, -torch.stack(picked).sum() / 10)


@torch.no_grad()
def test_logits_to_keep_hidden_states_and_tuples() -> None:
    model, ids = make(), tokens()
    full = model(ids, output_hidden_states=True)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, full.logits[:, -3:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, full.logits[:, [0, 4]])
    assert len(full.hidden_states) == 3
    torch.testing.assert_close(full.hidden_states[-1], model.model(ids).last_hidden_state)
    torch.testing.assert_close(model(ids, return_dict=False)[0], full.logits)
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, full.logits)


def test_auto_classes_and_tied_weights(tmp_path: Path) -> None:
    model = make()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert isinstance(AutoModel.from_pretrained(tmp_path), MilepostModel)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, MilepostForCausalLM) and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    untied = make(tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_encodings_stay_float32_however_a_model_becomes_bfloat16() -> None:
    config = make("kerple-log").config
    for model in (
        make("kerple-log").to(torch.bfloat16),
        make("kerple-log").half(),
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
    ):
        assert {p.dtype for p in model.model.encodings.parameters()} == {torch.float32}
        assert model.model.embed_tokens.weight.dtype != torch.float32


@pytest.mark.parametrize("encoding", ["fire", "clex", "rope-2d-mixed", "clex+kerple-log"])
def test_gradient_checkpointing_changes_nothing_and_refuses_what_would_lose_gradients(encoding: str) -> None:
    ids = tokens()
    model = make(encoding, dropout=0.0).train()
    torch.manual_seed(1)
    model(ids, labels=ids).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    torch.manual_seed(1)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])
    with pytest.raises(ValueError, match="use_reentrant=True loses the gradients of encodings"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "give input_ids or inputs_embeds"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"input_ids has shape \(batch, length\)"),
        (
            {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": torch.ones(3, 4)},
            r"attention_mask has shape \(2, all tokens\); got \(3, 4\)",
        ),
        (
            {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 1, 4, 4)},
            r"attention_mask has shape \(2, all tokens\)",
        ),
        (
            {
                "input_ids": torch.zeros(1, 4, dtype=torch.long),
                "attention_mask": torch.tensor([[-math.inf, 0.0, 0.0, 0.0]]),
            },
            "give attention_mask == 0 instead",
        ),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.long), "attention_mask": torch.ones(1, 3)}, "covers all 4 tokens"),
        (
            {
                "input_ids": torch.zeros(1, 4, dtype=torch.long),
                "document_ids": torch.zeros(1, 4, dtype=torch.long),
                "position_ids": torch.arange(4)[None],
            },
            "document_ids go with neither",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(**inputs)


def test_encodings_that_read_tokens_refuse_a_cache_without_them() -> None:
    model, ids, cache = make("bipe-rope"), tokens(), DynamicCache()
    model(ids[:, :10], cache=cache)
    with pytest.raises(ValueError, match="reads the ids of all 11 tokens, cached and new; got 1: pass context_tokens"):
        model(ids[:, 10:11], cache=cache)


@torch.no_grad()
def test_position_ids_are_read_and_masks_with_holes_are_right() -> None:
    model, ids = make("alibi"), tokens(1)
    natural = torch.arange(17)[None]
    torch.testing.assert_close(model(ids, position_ids=natural).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert (model(ids, position_ids=natural * 3).logits - model(ids).logits).abs().max() > 1e-3
    mask = torch.ones_like(ids)
    mask[:, 4:7] = 0
    kept = mask[0].bool()
    torch.testing.assert_close(
        model(ids, attention_mask=mask).logits[:, kept], model(ids[:, kept]).logits, atol=1e-5, rtol=1e-5
    )


@torch.no_grad()
def test_segments_reach_the_encoding_that_embeds_them() -> None:
    model, ids = make("segments"), tokens()
    types = (torch.arange(17) > 8).long()[None].expand(2, -1)
    assert (model(ids, token_type_ids=types).logits - model(ids).logits).abs().max() > 1e-3


# ---- generation: logits, never ids ----


def generated(model: MilepostForCausalLM, ids: Tensor, **options: Any) -> Any:
    return model.generate(
        ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None,
        **options,
    )  # fmt: skip


ENCODINGS = ["rope", "alibi", "kerple-log", "fire", "shaw", "learned", "bipe-rope", "rope/nope", "sinusoidal+t5"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_generation_with_any_cache_gives_the_logits_of_a_full_pass(encoding: str) -> None:
    model, ids = make(encoding, num_kv_heads=2), tokens(2, 9)
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        out = generated(model, ids, **options)
        full = model(out.sequences).logits[:, 8:-1]
        torch.testing.assert_close(torch.stack(out.logits, 1), full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_left_padded_generation_equals_each_row_alone(encoding: str) -> None:
    model, ids = make(encoding), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for options in ({}, {"cache_implementation": "static"}):
        batch = torch.stack(generated(model, ids, attention_mask=mask, **options).logits, 1)
        alone = torch.stack(generated(model, ids[:1, 4:]).logits, 1)
        torch.testing.assert_close(batch[:1], alone, atol=1e-4, rtol=1e-4)
        other = torch.stack(generated(model, ids[1:]).logits, 1)
        torch.testing.assert_close(batch[1:], other, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_beam_search_scores_are_those_of_a_full_pass() -> None:
    model, ids = make("alibi"), tokens(2, 9)
    out = model.generate(
        ids, max_new_tokens=4, num_beams=3, do_sample=False, return_dict_in_generate=True, output_scores=True,
        eos_token_id=None, length_penalty=0.0,
    )  # fmt: skip
    logprobs = model(out.sequences).logits[:, 8:-1].log_softmax(-1)
    picked = logprobs.gather(-1, out.sequences[:, 9:, None]).sum((1, 2))
    torch.testing.assert_close(out.sequences_scores, picked, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_sampling_and_chunked_prefill() -> None:
    model, ids = make(), tokens(2, 12)
    torch.manual_seed(5)
    first = model.generate(ids, max_new_tokens=8, do_sample=True, temperature=2.0)
    torch.manual_seed(5)
    assert torch.equal(first, model.generate(ids, max_new_tokens=8, do_sample=True, temperature=2.0))
    torch.manual_seed(6)
    assert not torch.equal(first, model.generate(ids, max_new_tokens=8, do_sample=True, temperature=2.0))
    chunked = generated(model, ids, prefill_chunk_size=5)
    torch.testing.assert_close(torch.stack(chunked.logits), torch.stack(generated(model, ids).logits))


@torch.no_grad()
def test_generation_goes_on_from_a_cache() -> None:
    model, ids = make("fire"), tokens(1, 12)
    cache = model(ids[:, :7], use_cache=True).cache
    out = torch.stack(generated(model, ids, cache=cache).logits)
    torch.testing.assert_close(out, torch.stack(generated(model, ids).logits), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_static_cache_can_be_used_again() -> None:
    model, ids = make("rope"), tokens(1, 12)
    cache = StaticCache(config=model.config, max_cache_len=20)
    first = model(ids, cache=cache).logits
    cache.reset()
    torch.testing.assert_close(model(ids, cache=cache).logits, first, atol=1e-5, rtol=1e-5)


# ---- cross-attention ----


def cross(encoding: Encoding | None, **options: Any) -> CrossAttention:
    torch.manual_seed(0)
    return CrossAttention(MilepostConfig(width=32, num_heads=4, num_kv_heads=2), encoding, **options)


@torch.no_grad()
def test_cross_attention_reads_distances_from_a_common_origin() -> None:
    layer, x, memory = cross(build("alibi", num_heads=4)), torch.randn(2, 5, 32), torch.randn(2, 8, 32)
    q = layer.q_proj(x).view(2, 5, 4, 8).transpose(1, 2)
    k, v = (t.view(2, 8, 2, 8).transpose(1, 2).repeat_interleave(2, 1) for t in layer.kv_proj(memory).chunk(2, -1))
    distance = torch.arange(5)[:, None] - torch.arange(8)[None]
    slopes = torch.tensor([2.0 ** (-8 * h / 4) for h in range(1, 5)])
    logits = q @ k.mT / math.sqrt(8) - slopes[:, None, None] * distance.abs()
    expected = layer.o_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, memory), expected, atol=1e-5, rtol=1e-5)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[:, 6:] = 0
    torch.testing.assert_close(layer(x, memory, mask), layer(x, memory[:, :6]), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_cross_attention_without_a_common_origin_refuses_relative_encodings() -> None:
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 8, 32)
    for name, options in [("alibi", {"num_heads": 4}), ("rope", {"head_dim": 8})]:
        with pytest.raises(ValueError, match=f"{name} reads distances between two sequences that share no origin"):
            cross(build(name, **options), aligned=False)(x, memory)
    for encoding in (None, build("nope"), build("sinusoidal", width=32)):
        assert cross(encoding, aligned=False)(x, memory).shape == x.shape


# ---- lm-eval ----


def test_lm_eval_runs_on_the_model() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from milepost.data import byte_tokenizer

    model, tokenizer = make("alibi"), byte_tokenizer()
    lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=2, max_length=48, device="cpu")

    def ask(kind: str, *arguments: Any) -> list[Instance]:
        return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]  # type: ignore[arg-type]

    (first, _), (second, _) = lm.loglikelihood(ask("loglikelihood", ("The cat", " sat"), ("A much longer dog", " ran")))
    ids = torch.tensor([list(b"The cat sat")])
    logprobs = model(ids).logits.log_softmax(-1)[0, 6:-1]
    expected = logprobs.gather(-1, ids[0, 7:, None]).sum().detach()
    assert abs(first - float(expected)) < 1e-3 and second < 0
    rolling = lm.loglikelihood_rolling(ask("loglikelihood_rolling", ("A text of more than forty-eight bytes. " * 3,)))
    assert rolling[0] < -100
    short = {"until": ["\n"], "max_gen_toks": 5}
    answers = lm.generate_until(ask("generate_until", ("Say:", short), ("A longer prompt", short)))
    assert len(answers) == 2 and all(isinstance(answer, str) for answer in answers)


@torch.no_grad()
def test_no_tokens_have_no_logits() -> None:
    model, ids = make("alibi+rope"), tokens()
    assert model(ids[:, :0]).logits.shape == (*ids[:, :0].shape, model.config.vocab_size)
    cache = model(ids, use_cache=True).cache
    model(ids[:, :0], cache=cache)
    assert cache.get_seq_length() == ids.shape[1]
