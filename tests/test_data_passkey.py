from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from milepost.data import (
    PAD_ID,
    DataError,
    FillError,
    PasskeyDataset,
    PasskeyTask,
    byte_tokenizer,
    decode_bytes,
    splice,
)
from milepost.data.passkey import check_once

REPORTS = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "data" / "public-reports.json").read_text("utf-8"))
}
small = PasskeyTask.small()


def occurrences(ids: np.ndarray, needle: np.ndarray) -> list[int]:
    return [i for i in range(len(ids) - len(needle) + 1) if ids[i : i + len(needle)].tolist() == needle.tolist()]


@given(length=st.integers(17, 300), depth=st.floats(0, 1), seed=st.integers(0, 99), index=st.integers(0, 99))
def test_the_needle_is_there_once_at_its_depth_and_the_prompt_is_full(
    length: int, depth: float, seed: int, index: int
) -> None:
    prompt = small.prompt(length, depth=depth, seed=seed, index=index)
    assert len(prompt) == length
    begin, end = prompt.needle
    needle = prompt.input_ids[begin:end]
    assert decode_bytes(needle).decode() == f"#{prompt.key} "
    assert occurrences(prompt.input_ids, needle) == [begin]
    assert begin == round(depth * (length - len(needle) - 1 - 5))
    assert decode_bytes(prompt.input_ids).decode().endswith(f"#{prompt.key}")
    assert decode_bytes(prompt.answer).decode() == prompt.key
    assert len(set(prompt.key)) == 5


def test_prompts_are_pure_functions_of_seed_and_index() -> None:
    first = [small.prompt(64, depth=0.5, seed=1, index=i).input_ids.tolist() for i in range(10)]
    assert first == [small.prompt(64, depth=0.5, seed=1, index=i).input_ids.tolist() for i in range(10)]
    assert len({tuple(ids) for ids in first}) == 10
    assert small.prompt(64, depth=0.5, seed=2).input_ids.tolist() != first[0]


def test_many_prompts_cover_the_depths() -> None:
    prompts = small.prompts(128, count=8, seed=0)
    assert [round(prompt.depth * 16) for prompt in prompts] == [1, 3, 5, 7, 9, 11, 13, 15]
    chosen = small.prompts(128, count=4, seed=0, depths=[0.0, 1.0])
    assert [round(prompt.depth) for prompt in chosen] == [0, 1, 0, 1]


def test_chance_is_what_guessing_gives() -> None:
    plain = PasskeyTask.sentences(key_digits=2)
    rng = np.random.default_rng(0)
    for task, tries in ((plain, 20000), (PasskeyTask.small(key_digits=2), 20000)):
        keys = [task.prompt(task.min_length, depth=0, seed=0, index=i).key for i in range(200)]
        if task.distinct_digits:
            guesses = ["".join(map(str, rng.permutation(10)[:2])) for _ in range(tries)]
        else:
            guesses = ["".join(map(str, rng.integers(0, 10, 2))) for _ in range(tries)]
        exact = np.mean([guess == keys[i % 200] for i, guess in enumerate(guesses)])
        assert abs(exact - task.chance[1]) < 0.003
    assert plain.chance == (0.1, 0.01)
    assert PasskeyTask.small(key_digits=2).chance == pytest.approx(((1 / 10 + 1 / 9) / 2, 1 / 90))


def test_a_length_too_short_names_the_least() -> None:
    assert small.min_length == 13
    with pytest.raises(DataError, match="which take 13"):
        small.prompt(12, depth=0.5, seed=0)
    assert len(small.prompt(13, depth=0.5, seed=0)) == 13
    with pytest.raises(DataError, match="depth=1.5"):
        small.prompt(64, depth=1.5, seed=0)


@pytest.fixture(scope="module")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A Llama-like tokenizer: <s> is put in front whenever special tokens are asked for."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "blue": 5809, "green": 456, "red": 789, "grass": 10, "sky": 11}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_PE_59_needle_ids_are_spliced_with_no_special_tokens(word_tokenizer: PreTrainedTokenizerFast) -> None:
    case = REPORTS["PE-59"]
    given_, expected = case["input"], case["expected"]
    assert word_tokenizer.encode("blue green red") == given_["needle_ids_with_special"]
    task = PasskeyTask(
        tokenizer=word_tokenizer,
        needle="blue green red {key}",
        question="sky",
        answer="{key}",
        filler=("grass", "sky grass"),
    )
    length = given_["context_tokens"] + len(expected["needle_ids"]) + 1 + 1 + 1
    prompt = task.prompt(length, depth=given_["depth"], seed=0)
    begin, end = prompt.needle
    assert prompt.input_ids[begin : begin + 3].tolist() == expected["needle_ids"]
    assert [begin, begin + 3] == expected["needle_at"] and end == begin + 4
    assert (prompt.input_ids == given_["bos_id"]).sum() == expected["bos_count_in_prompt"]
    assert prompt.input_ids[0] == given_["bos_id"]

    context = [given_["bos_id"], *[10] * (given_["context_tokens"] - 1)]
    ids, span = splice(context, expected["needle_ids"], given_["depth"])
    assert list(span) == expected["needle_at"]
    assert occurrences(ids, np.array(expected["needle_ids"])) == [span[0]]


def test_PE_60_a_prompt_that_falls_short_is_an_error_with_its_real_length() -> None:
    case = REPORTS["PE-60"]
    built, target = case["input"]["built_tokens"], case["input"]["target_tokens"]
    min_fill = case["expected"]["min_fill"]
    overhead = len(PasskeyTask.sentences().prompt(PasskeyTask.sentences().min_length, depth=0, seed=0))
    task = PasskeyTask.corpus_filler(np.full(built - overhead, ord("x"), dtype=np.uint16))
    with pytest.raises(FillError, match=f"{built} tokens of the {target}") as caught:
        task.prompt(target, depth=0.5, seed=0)
    assert caught.value.built == case["expected"]["reported_length"]
    assert caught.value.min_fill == min_fill
    assert pickle.loads(pickle.dumps(caught.value)).built == built
    nearly = task.prompt(int(built / min_fill), depth=0.5, seed=0)
    assert len(nearly) == built
    assert len(task.prompt(built, depth=0.5, seed=0)) == built


def test_a_needle_that_occurs_elsewhere_is_refused() -> None:
    with pytest.raises(DataError, match=r"occurs at \[0, 2\], expected once at 2"):
        splice([7, 8], [7, 8], 1.0)
    with pytest.raises(DataError, match="occurs at"):
        check_once(np.array([1, 2, 3]), [2], 0)
    with pytest.raises(DataError, match="no tokens"):
        splice([7, 8], [], 1.0)


def test_sentences_with_any_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    for task in (PasskeyTask.sentences(tokenizer), PasskeyTask.sentences(None)):
        prompt = task.prompt(900, depth=0.0, seed=4)
        text = decode_bytes(prompt.input_ids).decode()
        assert len(prompt) == 900 and text.endswith(f"The pass key is {prompt.key}")
        assert prompt.needle[0] == len(task.intro)
    stream = np.frombuffer(("Some long text without end. " * 200).encode(), np.uint8)
    filled = PasskeyTask.corpus_filler(stream).prompt(2000, depth=0.7, seed=0)
    assert len(filled) == 2000 and b"long text" in decode_bytes(filled.input_ids)


def test_training_prompts(word_tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = PasskeyDataset(small, items=300, max_length=64, seed=5)
    lengths = set()
    for i in range(len(dataset)):
        item = dataset[i]
        ids, labels = item["input_ids"], item["labels"]
        assert ids.shape == labels.shape == (64,) and ids.dtype == torch.int64
        answer = (labels != -100).nonzero().flatten()
        assert len(answer) == 5 and torch.equal(ids[answer], labels[answer])
        end = int(answer[-1]) + 1
        assert (ids[end:] == PAD_ID).all() and (ids[:end] != PAD_ID).all()
        lengths.add(end)
    assert min(lengths) == 13 and max(lengths) == 64 and len(lengths) > 40
    again = PasskeyDataset(small, items=300, max_length=64, seed=5)
    assert torch.equal(again[17]["input_ids"], dataset[17]["input_ids"])
    fixed = PasskeyDataset(small, items=3, max_length=64, min_length=64)
    assert all((fixed[i]["labels"][-5:] != -100).all() for i in range(3))
    task = PasskeyTask(tokenizer=word_tokenizer, needle="red {key}", question="sky", answer="{key}", filler=("grass",))
    assert PasskeyDataset(task, items=1, max_length=9).pad_id == word_tokenizer.eos_token_id
    with pytest.raises(IndexError):
        fixed[3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PasskeyDataset(small, items=1, max_length=12), "at least 13"),
        (lambda: PasskeyDataset(small, items=1, max_length=64, min_length=65), "65 .. 64"),
        (lambda: PasskeyTask(needle="x", question="q", answer="{key}", filler=("a",)), "must both contain"),
        (lambda: PasskeyTask(needle="{key}", question="q", answer="{key}"), "either filler"),
        (lambda: PasskeyTask.small(key_digits=11), "between 1 and 10"),
        (lambda: PasskeyTask.sentences(key_digits=0), "at least 1"),
        (
            lambda: PasskeyTask(needle="#{key}", question="#", answer="{key}", filler=("",)).prompt(
                64, depth=0.5, seed=0
            ),
            "no tokens",
        ),
    ],
)
def test_tasks_that_cannot_be_are_refused(call: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_the_answer_is_tokenised_as_the_continuation_of_the_question() -> None:
    """A Llama-like tokenizer puts a space mark before every text; the answer must not get one of its own."""
    vocabulary = {mark: i for i, mark in enumerate(["<unk>", "</s>", "▁", *"0123456789abcdefghijklmnopqrstuvwxyz?"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    task = PasskeyTask(tokenizer=tokenizer, needle="key {key}", question="key?", answer=" {key}", filler=("red", "oak"))
    prompt = task.prompt(60, depth=0.5, seed=0)
    assert len(prompt) == 60
    assert tokenizer.convert_ids_to_tokens(prompt.answer.tolist()) == ["▁", *prompt.key]
    ending = tokenizer.convert_ids_to_tokens(prompt.input_ids.tolist())[-11:]
    assert ending == ["▁", "k", "e", "y", "?", "▁", *prompt.key]


def test_training_and_test_prompts_differ_under_one_seed() -> None:
    keys = [small.prompt(64, depth=0.5, seed=0, index=i) for i in range(50)]
    dataset = PasskeyDataset(small, items=50, max_length=64, min_length=64, seed=0)
    same = sum(torch.equal(dataset[i]["input_ids"][-5:], torch.from_numpy(keys[i].answer)) for i in range(50))
    assert same <= 1
