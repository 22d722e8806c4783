from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
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


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2"])
def test_left_padded_batches_with_a_static_cache(name: str, beams: int) -> None:
    """`generate` makes the masks of a static cache ahead of the forward pass."""
    model, ids = tiny(name), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "num_beams": beams, "cache_implementation": "static"}
    wanted, _ = step_logits(model, ids, 6, **options)
    with attach(model, "own"):
        got, _ = step_logits(model, ids, 6, **options)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "how", ["keywords", "configuration", "positional", "max_length", "defaults", "model", "embeds"]
)
def test_fixed_lengths_are_those_generate_ends_with(how: str) -> None:
    from transformers import GenerationConfig

    model, ids = tiny("llama", max_position_embeddings=16), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "eos_token_id": None}
    if how == "model":
        model.generation_config.max_new_tokens = 8
    calls: dict[str, Any] = {
        "keywords": lambda: model.generate(ids, max_new_tokens=8, **plain),
        "configuration": lambda: model.generate(ids, attention_mask=mask, generation_config=settings),
        "positional": lambda: model.generate(ids, settings, attention_mask=mask),
        "max_length": lambda: model.generate(ids, max_length=20, **plain),
        "defaults": lambda: model.generate(ids, **plain),  # 20 more, but no more than the model declares
        "model": lambda: model.generate(ids, **plain),
        "embeds": lambda: model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=8, **plain),
    }
    with attach(model, "dynamic-ntk") as attachment:
        seen: list[list[int]] = []
        lengths = attachment._lengths
        attachment._lengths = lambda now: (seen.append(lengths(now).tolist()), lengths(now))[1]
        out = calls[how]()
    new = out.shape[1] - (0 if how == "embeds" else 12)
    assert new == (4 if how == "defaults" else 8)
    assert all(rows == [12 + new, 7 + new] for rows in seen) and len(seen) == new


def test_a_copy_of_an_attached_model_would_attend_through_the_original() -> None:
    model = tiny("llama")
    with attach(model, "t5"):
        with pytest.raises(TypeError, match="detach first and attach to the copy"):
            copy.deepcopy(model)
        with pytest.raises(TypeError, match="detach first and attach to the copy"):
            pickle.dumps(model)
    copy.deepcopy(model)


def test_a_model_is_freed_though_nobody_detached() -> None:
    model = tiny("llama")
    attachment = attach(model, "alibi")
    key, model_reference = attachment.key, weakref.ref(model)
    del model, attachment
    gc.collect()
    assert model_reference() is None
    from transformers.modeling_utils import AttentionInterface

    assert key not in AttentionInterface._global_mapping


def test_one_decoder_has_one_encoding() -> None:
    model = tiny("llama")
    with attach(model, "alibi"), pytest.raises(ValueError, match="attached already"):
        attach(model.model, "rope")
    with attach(model.model, "alibi"), pytest.raises(ValueError, match="attached already"):
        attach(model, "rope")
    attach(model, "alibi")
    detach(model.model)
    assert torch.equal(logits(model, tokens()), logits(tiny("llama"), tokens()))


def test_position_ids_that_cannot_be_served_are_refused() -> None:
    model, ids = tiny("llama"), tokens(1, 12)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    place = torch.arange(12)[None]
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    packed = place % 6
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, position_ids=counted).logits[:, 1:]
        with attach(model, "own"):
            for position_ids in (counted, place, place + 7, counted.masked_fill(mask == 0, 1)):
                got = model(ids, attention_mask=mask, position_ids=position_ids).logits[:, 1:]
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
            with pytest.raises(ValueError, match=r"row 0 has position_ids \[0, 1, 2, 3, 4, 5, 0, 1\]"):
                model(ids, attention_mask=mask, position_ids=packed)
            cache = model(ids, use_cache=True).cache
            with pytest.raises(ValueError, match=r"position_ids \[20\] ... where its tokens count \[12\]"):
                model(ids[:, :1], cache=cache, position_ids=torch.tensor([[20]]))


def test_an_attention_set_while_attached_is_an_error() -> None:
    model = tiny("llama")
    with attach(model, "alibi"):
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="no layer would know positions"):
            logits(model, tokens())
    logits(model, tokens())


def test_reentrant_checkpointing_is_refused_where_it_loses_gradients() -> None:
    model = tiny("llama")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    with attach(model, "t5"), pytest.raises(ValueError, match="'use_reentrant': False"):
        model(tokens(), labels=tokens())
    with attach(model, "alibi"):
        model(tokens(), labels=tokens()).loss.backward()


def test_encodings_made_in_inference_mode_can_be_trained() -> None:
    model = tiny("llama")
    with torch.inference_mode():
        attachment = attach(model, "t5")
    model.train()
    model(tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for p in attachment.encodings[0].parameters())


def test_what_others_wrapped_stays_wrapped() -> None:
    model = tiny("gpt2")
    table, generate, forward = model.transformer.wpe, model.generate, model.transformer.wpe.forward
    calls = []
    model.generate = lambda *args, **kwargs: (calls.append("generate"), generate(*args, **kwargs))[1]
    table.forward = lambda *args, **kwargs: (calls.append("forward"), forward(*args, **kwargs))[1]
    mine = model.generate, table.forward
    with attach(model, "alibi"):
        model.generate(tokens(1, 5), max_new_tokens=1)
    assert calls[-2:] == ["generate", "forward"] and (model.generate, table.forward) == mine
    own = tiny("bloom")
    block = own.transformer.h[0].self_attention
    wrapped = block.forward = functools.partial(block.forward)
    attach(own, "own").detach()
    assert block.forward is wrapped


def test_prompt_lookup_is_refused_wherever_it_is_asked_for() -> None:
    from transformers import GenerationConfig

    model = tiny("llama")
    with attach(model, "alibi"), pytest.raises(ValueError, match="assisted decoding"):
        model.generate(tokens(1, 8), GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=4))


def test_threads_may_use_a_model_at_once() -> None:
    model = tiny("llama")
    prompts = [tokens(1, length) for length in (8, 15, 21)]
    with attach(model, "dynamic-ntk"):
        wanted = [step_logits(model, prompt, 60)[0] for prompt in prompts]
        got: dict[int, torch.Tensor] = {}
        threads = [
            threading.Thread(target=lambda i=i: got.update({i: step_logits(model, prompts[i], 60)[0]}))
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, logits_ in enumerate(wanted):
        torch.testing.assert_close(got[i], logits_)
