from __future__ import annotations

from typing import Any

import pytest
import torch

from milepost.extend.attach import attach, detach
from tests.tiny_models import MODELS, logits, tiny

REFUSED = {"deepseek": "latent attention"}
SERVED = [name for name in MODELS if name not in REFUSED]
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip
METHODS = ["dynamic-ntk", "longrope", "clex", "yarn:factor=4", "rerope:window=6", "self-extend:group=2:window=4",
           "stair:window=6:step=2", "alibi", "nope"]  # fmt: skip


def tokens(rows: int = 2, length: int = 40) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def step_logits(model: Any, prompt: torch.Tensor, new: int, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every generated step, and the whole sequences."""
    out = model.generate(
        prompt,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )
    return torch.stack(out.logits, 1), out.sequences


@pytest.mark.parametrize("name", SERVED)
def test_own_settings_give_the_same_logits_and_detach_restores(name: str) -> None:
    model, ids = tiny(name), tokens()
    wanted = logits(model, ids)
    wanted_steps, _ = step_logits(model, ids[:, :10], 5)
    with attach(model, "own"):
        torch.testing.assert_close(logits(model, ids), wanted, atol=1e-5, rtol=0)
        got_steps, _ = step_logits(model, ids[:, :10], 5)
        torch.testing.assert_close(got_steps, wanted_steps, atol=1e-5, rtol=0)
    assert torch.equal(logits(model, ids), wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str) -> None:
    model = tiny(name)
    with pytest.raises(ValueError, match=REFUSED[name]):
        attach(model, "alibi")
    logits(model, tokens())  # the model is left as it was


@pytest.mark.parametrize("length", [12, 60])
@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_all_rope_types(kind: str, length: int) -> None:
    limit = 16 if kind == "dynamic" else 64
    parameters = {"rope_theta": 1e4, **ROPE_TYPES[kind]}
    model = tiny("llama", rope_parameters=parameters, max_position_embeddings=limit)
    ids = tokens(length=length)
    wanted = logits(model, ids)
    with attach(model, "own"):
        torch.testing.assert_close(logits(model, ids), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("method", METHODS)
def test_token_by_token_equals_one_full_pass(method: str, cache: str) -> None:
    model, ids = tiny("llama", max_position_embeddings=16), tokens()
    with attach(model, method):
        kwargs = {} if cache == "dynamic" else {"cache_implementation": "static"}
        steps, sequences = step_logits(model, ids[:, :10], 20, **kwargs)
        full = logits(model, sequences)[:, 9:-1]
    torch.testing.assert_close(steps, full, atol=1e-5, rtol=0)


def test_growing_lengths_differ_from_a_full_pass_and_say_so() -> None:
    model, ids = tiny("llama", max_position_embeddings=16), tokens()
    with attach(model, "dynamic-ntk", length="growing"):
        steps, sequences = step_logits(model, ids[:, :10], 20)
        full = logits(model, sequences)[:, 9:-1]
    assert (steps - full).abs().max() > 1e-3
    assert attach.__doc__ is not None and "cannot equal a full pass" in attach.__doc__


@pytest.mark.parametrize("method", [*METHODS, "own"])
def test_a_row_depends_on_nothing_but_itself(method: str) -> None:
    """Padding, batch mates of other lengths, and earlier calls change nothing (PE-17, PE-19)."""
    model, ids = tiny("llama", max_position_embeddings=16), tokens()
    mask = torch.ones_like(ids)
    mask[1, :27] = 0
    with attach(model, method):
        alone = logits(model, ids[1:, 27:])
        logits(model, tokens(1, 64))
        batch = logits(model, ids, attention_mask=mask)
        torch.testing.assert_close(batch[1:, 27:], alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits(model, ids[1:, 27:]), alone, atol=1e-5, rtol=0)
        right = torch.cat([ids[1:, 27:], ids[1:, :27]], 1)
        mask = torch.ones_like(ids)
        mask[1, 13:] = 0
        batch = logits(model, torch.cat([ids[:1], right]), attention_mask=mask)
        torch.testing.assert_close(batch[1:, :13], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["dynamic-ntk", "rerope:window=6", "alibi"])
def test_left_padded_batches_generate_as_their_rows_do(method: str) -> None:
    model, ids = tiny("llama", max_position_embeddings=16), tokens(length=14)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with attach(model, method):
        together, _ = step_logits(model, ids, 8, attention_mask=mask)
        alone, _ = step_logits(model, ids[:1, 5:], 8)
        beams = model.generate(ids, attention_mask=mask, max_new_tokens=8, num_beams=3, do_sample=False)
        beam = model.generate(ids[1:], max_new_tokens=8, num_beams=3, do_sample=False)
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=0)
    assert torch.equal(beams[1:, 14 : 14 + 8], beam[:, 14 : 14 + 8])


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4", "cohere2", "qwen2-sliding"])
def test_prefill_in_chunks_equals_one_pass(name: str) -> None:
    from transformers import DynamicCache

    model, ids = tiny(name), tokens(length=30)
    with attach(model, "own"):
        full = logits(model, ids)
        cache, parts = DynamicCache(config=model.config), []
        for chunk in ids.split([11, 3, 1, 15], 1):
            with torch.no_grad():
                out = model(input_ids=chunk, cache=cache, use_cache=True)
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=0)


def test_packed_documents_by_position_ids() -> None:
    model, ids = tiny("llama"), tokens(1, 20)
    position_ids = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with attach(model, "alibi"):
        packed = logits(model, ids, position_ids=position_ids)
        apart = torch.cat([logits(model, ids[:, :8]), logits(model, ids[:, 8:])], 1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=0)


def test_a_learned_encoding_trains_under_gradient_checkpointing() -> None:
    model, ids = tiny("llama"), tokens()
    grads = []
    for checkpointing in (False, True):
        with attach(model, "kerple-log") as attachment:
            encoding = next(iter(attachment.encodings.values()))
            torch.manual_seed(0)
            encoding.reset_parameters()
            model.train()
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            grads.append(torch.autograd.grad(loss, [*encoding.parameters(), model.model.embed_tokens.weight]))
            model.gradient_checkpointing_disable()
            model.eval()
    for a, b in zip(*grads, strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_bfloat16_models() -> None:
    model, ids = tiny("llama"), tokens()
    with attach(model, "yarn:factor=4"):
        wanted = logits(model, ids)
    model = model.to(torch.bfloat16)
    with attach(model, "yarn:factor=4"):
        got = logits(model, ids)
    assert got.dtype == torch.bfloat16
    assert (got.float() - wanted).abs().mean() < 0.05 * wanted.abs().mean() + 0.02


@pytest.mark.parametrize("keep", [False, True])
def test_learned_positions_are_replaced_or_kept_by_choice(keep: bool) -> None:
    model, ids = tiny("gpt2"), tokens()
    swapped = torch.cat([ids[:, 1:2], ids[:, :1], ids[:, 2:]], 1)
    with attach(model, "alibi", keep_absolute=keep):
        first, second = logits(model, ids)[:, 0], logits(model, ids)[:, 0]
        torch.testing.assert_close(first, second)
        moved = (logits(model, ids) - logits(model, swapped))[:, -1].abs().max()
    assert moved > 1e-5  # order matters either way
    with attach(model, "nope", keep_absolute=keep):
        moved = (logits(model, ids[:, :2].flip(1))[:, -1] - logits(model, ids[:, :2].flip(1))[:, -1]).abs().max()
        same_token = logits(model, torch.full((1, 6), 7))[0]
        spread = (same_token - same_token[:1]).abs().max()
    assert moved == 0
    assert (spread > 1e-4) == keep  # without positions, equal tokens cannot be told apart


def test_only_full_layers_are_stretched() -> None:
    model = tiny("gemma3")
    with attach(model, "yarn:factor=4") as attachment:
        names = [attachment.encodings[layer].name for layer in sorted(attachment.encodings)]
    assert [name == "yarn" for name in names] == [t == "full_attention" for t in model.config.layer_types]


def test_wrong_use_is_said() -> None:
    model, ids = tiny("llama"), tokens()
    with attach(model, "alibi"):
        with pytest.raises(ValueError, match="attached already"):
            attach(model, "rope")
        with pytest.raises(ValueError, match="2-D attention_mask"):
            logits(model, ids, attention_mask=torch.zeros(2, 1, 40, 40))
        with pytest.raises(ValueError, match="assisted decoding"):
            model.generate(ids, assistant_model=tiny("llama"), max_new_tokens=2)
    with pytest.raises(ValueError, match="'fixed', 'growing' or a number"):
        attach(model, "alibi", length="short")
    with pytest.raises(ValueError, match="nearest: alibi"):
        attach(model, "alibo")
    assert torch.equal(logits(model, ids), logits(tiny("llama"), ids))
    detach(model)


def test_trainer_runs_with_an_attached_encoding(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    model = tiny("llama")
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 24)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to="none", save_strategy="no", use_cpu=True
    )
    before = model.model.embed_tokens.weight.detach().clone()
    with attach(model, "alibi"):
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert not torch.equal(model.model.embed_tokens.weight, before)
