from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from milepost.data import EOS_ID, PAD_ID, VOCAB_SIZE, DataError, byte_tokenizer, decode_bytes, encode_bytes
from milepost.data.tokens import encode_plain, separator_of, tokenizer_fingerprint


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def test_vocabulary_is_256_bytes_pad_and_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCAB_SIZE == 258
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID) == (256, 257)
    assert sorted(tokenizer.get_vocab().values()) == list(range(258))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_round_trip_and_ids_are_bytes(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8")) == encode_bytes(text).tolist()
    assert tokenizer.decode(ids) == text
    assert decode_bytes(ids).decode("utf-8") == text


@pytest.mark.parametrize("text", ["<|eos|>", "a<|pad|>b", " ##x", "don 't .", "\r\n\x00\x7f", "e\u0301", "\ufeffx"])
def test_text_that_looks_special_is_bytes(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


@given(st.binary())
def test_any_bytes_round_trip(data: bytes) -> None:
    assert decode_bytes(encode_bytes(data)) == data
    assert decode_bytes([*encode_bytes(data).tolist(), EOS_ID, PAD_ID]) == data


def test_decode_refuses_what_is_no_byte_token() -> None:
    with pytest.raises(DataError, match="258 is not a byte token"):
        decode_bytes([65, 258])


def test_save_and_load(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    for loaded in (PreTrainedTokenizerFast.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        text = "Ünï <|eos|> 12\n"
        assert loaded.encode(text) == list(text.encode("utf-8"))
        assert loaded.decode(loaded.encode(text)) == text
        assert (loaded.pad_token_id, loaded.eos_token_id) == (PAD_ID, EOS_ID)
        assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)


def test_batches_are_padded_with_pad(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = tokenizer(["abc", "a"], padding=True)
    assert batch["input_ids"] == [[97, 98, 99], [97, PAD_ID, PAD_ID]]
    assert batch["attention_mask"] == [[1, 1, 1], [1, 0, 0]]
    assert tokenizer.decode([97, EOS_ID, PAD_ID], skip_special_tokens=True) == "a"


def test_fingerprint_tells_vocabularies_apart_and_ignores_padding_state(tokenizer: PreTrainedTokenizerFast) -> None:
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["abc", "a"], padding="max_length", max_length=8, truncation=True)
    assert tokenizer_fingerprint(tokenizer) == before
    other = byte_tokenizer()
    other.add_tokens(["zebra"])
    assert tokenizer_fingerprint(other) != before


def test_encode_plain_adds_nothing(word_tokenizer: PreTrainedTokenizerFast) -> None:
    assert word_tokenizer.encode("one two") == [1, 3, 4]
    assert encode_plain(word_tokenizer, ["one two", ""]) == [[3, 4], []]
    assert separator_of(word_tokenizer) == 2


def test_a_tokenizer_with_no_end_token_needs_a_separator() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(DataError, match="separator_id"):
        separator_of(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.fixture
def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_encoding_bytes_gives_unsigned_integers() -> None:
    assert encode_bytes("é").dtype == np.uint16
