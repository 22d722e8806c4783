"""Passkey prompts: a key of digits hidden in filler and asked for at the end, spliced as token ids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milepost.data.batches import item_generator
from milepost.data.errors import DataError, FillError
from milepost.data.tokens import encode_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PasskeyPrompt:
    """One prompt with its answer.

    input_ids: (n,) int64, prompt and answer; the answer is input_ids[prompt_length:].
    needle: (begin, end) of the needle in input_ids.
    depth: begin divided by the tokens of context, which is all but needle, question and answer.
    key: the digits. `len(prompt)` is the real length, the one to report.
    """

    input_ids: Ints
    prompt_length: int
    needle: tuple[int, int]
    depth: float
    key: str

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def answer(self) -> Ints:
        return self.input_ids[self.prompt_length :]


@dataclass(frozen=True, kw_only=True, eq=False)
class PasskeyTask:
    """What prompts are made of: [bos] intro, filler with the needle at a depth, question, answer.

    key_digits, distinct_digits: how many digits a key has, and whether no digit comes twice.
    tokenizer: None for bytes. intro, question: text; needle, answer: text with "{key}".
    filler: pieces that are drawn at random and repeated without end.
    filler_tokens: instead of pieces, one long token array of which a random stretch is taken, and which can run out.

    Intro, needle, filler pieces, and question with answer are encoded apart, with nothing added, and their ids joined.
    The answer is what question and answer together have beyond the ids of the question alone.

    Ready tasks: `small()` for byte models trained in seconds, `sentences(tokenizer)` in plain English for pretrained
    ones, `corpus_filler(tokens, tokenizer)` with real text around the needle.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    intro: str = ""
    needle: str
    question: str
    answer: str
    filler: tuple[str, ...] = ()
    filler_tokens: npt.NDArray[Any] | None = None
    key_digits: int = 5
    distinct_digits: bool = False

    def __post_init__(self) -> None:
        if "{key}" not in self.needle or "{key}" not in self.answer:
            raise DataError(f"needle {self.needle!r} and answer {self.answer!r} must both contain {{key}}")
        if bool(self.filler) == (self.filler_tokens is not None):
            raise DataError("give either filler pieces or filler_tokens, not both and not neither")
        if self.key_digits < 1 or (self.distinct_digits and self.key_digits > 10):
            limit = "between 1 and 10 where digits are distinct" if self.distinct_digits else "at least 1"
            raise DataError(f"key_digits={self.key_digits} must be {limit}")

    @classmethod
    def small(cls, *, key_digits: int = 5) -> PasskeyTask:
        """A byte task for models of two or three layers: filler of six short words with "#12345 " in it, then "#".

        The digits of a key differ, so that each one says which comes next and a small model learns it in few steps.
        """
        return cls(
            needle="#{key} ",
            question="#",
            answer="{key}",
            filler=("red ", "oak ", "sun ", "fog ", "hen ", "ice "),
            key_digits=key_digits,
            distinct_digits=True,
        )

    @classmethod
    def sentences(cls, tokenizer: PreTrainedTokenizerBase | None = None, *, key_digits: int = 5) -> PasskeyTask:
        """Plain English, for any tokenizer."""
        return cls(
            tokenizer=tokenizer,
            intro="A pass key is hidden in the long text below. Remember it: the question at the end asks for it.\n",
            needle=" Now note this: the pass key is {key}. Keep {key} in mind, it is the pass key.",
            question="\nWhat was the pass key in the text? The pass key is",
            answer=" {key}",
            filler=(
                " Rain fell on the hills all day.",
                " The mill by the river stood still.",
                " Nobody came along the road.",
                " Smoke rose from a few chimneys.",
                " In the evening the wind turned north.",
            ),
            key_digits=key_digits,
        )

    @classmethod
    def corpus_filler(
        cls, tokens: npt.NDArray[Any], tokenizer: PreTrainedTokenizerBase | None = None, *, key_digits: int = 5
    ) -> PasskeyTask:
        """The needle in a random stretch of real text (`corpus.test[0].tokens`), which can run out."""
        sentences = cls.sentences(tokenizer, key_digits=key_digits)
        return cls(
            tokenizer=tokenizer,
            intro=sentences.intro,
            needle=sentences.needle,
            question=sentences.question,
            answer=sentences.answer,
            filler_tokens=tokens,
            key_digits=key_digits,
        )

    @property
    def chance(self) -> tuple[float, float]:
        """(token accuracy, exact accuracy) of a guesser who knows the answer's form and not its digits."""
        left = [10 - place if self.distinct_digits else 10 for place in range(self.key_digits)]
        return sum(1.0 / n for n in left) / len(left), 1.0 / math.prod(left)

    @property
    def min_length(self) -> int:
        """The shortest prompt, without filler. Exact for bytes; elsewhere keys vary, and the longest of 16 is taken."""
        keys = [str(digit) * self.key_digits for digit in range(10)]
        keys += [("0123456789" * self.key_digits)[start : start + self.key_digits] for start in range(6)]
        return max(len(head) + len(needle) + len(tail) for head, needle, tail, _ in map(self._parts, keys))

    def prompt(
        self, length: int, *, depth: float, seed: int, index: int = 0, min_fill: float = 0.97, draw: str = "pk-test"
    ) -> PasskeyPrompt:
        """A prompt of `length` tokens, answer included, the needle at `depth` (0: start of the context, 1: end).

        A pure function of (seed, index) and the arguments. The needle begins at round(depth * context), but never
        inside bos and intro. Filler is cut to the token.

        Raises `DataError` when needle, question and answer do not fit in `length`, or the needle's ids occur more than
        once; `FillError` when the filler runs out below min_fill * length.
        """
        if not 0.0 <= depth <= 1.0:
            raise DataError(f"depth={depth} must lie between 0 (start) and 1 (end of the context)")
        generator = item_generator(seed, index, draw)
        key = self._key(generator)
        head, needle, tail, answer = self._parts(key)
        room = length - len(head) - len(needle) - len(tail)
        if room < 0:
            raise DataError(
                f"a passkey prompt of {length} tokens cannot hold intro, needle, question and answer, which take "
                f"{length - room}: ask for at least that length"
            )
        context = np.array([*head, *self._filler(generator, room)], dtype=np.int64)
        check_fill(len(context) + len(needle) + len(tail), length, min_fill)
        ids, span = splice(context, needle, depth, first=len(head))
        whole = np.concatenate([ids, np.array(tail, dtype=np.int64)])
        check_once(whole, needle, span[0])
        return PasskeyPrompt(whole, len(whole) - len(answer), span, span[0] / max(len(context), 1), key)

    def prompts(
        self, length: int, *, count: int, seed: int, depths: Sequence[float] | None = None, min_fill: float = 0.97
    ) -> list[PasskeyPrompt]:
        """`count` prompts of one length; depths are cycled; default the middles of `count` equal parts of 0 .. 1."""
        chosen = [(i + 0.5) / count for i in range(count)] if depths is None else list(depths)
        return [
            self.prompt(length, depth=chosen[i % len(chosen)], seed=seed, index=i, min_fill=min_fill)
            for i in range(count)
        ]

    def _key(self, generator: np.random.Generator) -> str:
        if self.distinct_digits:
            return "".join(map(str, generator.permutation(10)[: self.key_digits]))
        return "".join(map(str, generator.integers(0, 10, size=self.key_digits)))

    def _parts(self, key: str) -> tuple[list[int], list[int], list[int], list[int]]:
        """(bos and intro, needle, question and answer, answer)."""
        texts = [self.intro, self.needle, self.question, self.question + self.answer]
        intro, needle, question, tail = encode_plain(self.tokenizer, [text.replace("{key}", key) for text in texts])
        pairs = zip(question, tail, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        bos = None if self.tokenizer is None else self.tokenizer.bos_token_id
        head = intro if bos is None else [int(bos), *intro]
        return head, needle, tail, tail[shared:]

    def _filler(self, generator: np.random.Generator, count: int) -> list[int]:
        if self.filler_tokens is not None:
            taken = min(count, len(self.filler_tokens))
            start = int(generator.integers(0, len(self.filler_tokens) - taken, endpoint=True))
            return [int(token) for token in self.filler_tokens[start : start + taken]]
        pieces = encode_plain(self.tokenizer, list(self.filler))
        shortest = min(map(len, pieces))
        if shortest == 0:
            raise DataError(f"a filler piece has no tokens: {self.filler!r}")
        ids: list[int] = []
        for choice in generator.integers(0, len(pieces), size=-(-count // shortest)):
            ids += pieces[choice]
        return ids[:count]


def splice(
    context: Ints | Sequence[int], needle: Sequence[int], depth: float, *, first: int = 0
) -> tuple[Ints, tuple[int, int]]:
    """Put needle ids into context ids at round(depth * len(context)), not before `first`: (ids, (begin, end)).

    Ids are spliced, never decoded and encoded again. Raises `DataError` when the needle's ids occur elsewhere too.
    """
    if len(needle) == 0:
        raise DataError("the needle has no tokens")
    ids = np.asarray(context, dtype=np.int64)
    begin = max(first, round(depth * len(ids)))
    whole = np.concatenate([ids[:begin], np.asarray(needle, dtype=np.int64), ids[begin:]])
    check_once(whole, needle, begin)
    return whole, (begin, begin + len(needle))


def check_once(ids: Ints, needle: Sequence[int], begin: int) -> None:
    """Raises `DataError` unless the needle's ids occur in `ids` exactly once, at `begin`."""
    wanted = np.asarray(needle, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(wanted))
    found = np.nonzero((windows == wanted).all(axis=1))[0].tolist()
    if found != [begin]:
        raise DataError(f"the needle occurs at {found}, expected once at {begin}: use filler that does not contain it")


def check_fill(built: int, target: int, min_fill: float) -> None:
    """Raises `FillError`, which carries the real length, when fewer than min_fill * target tokens were built."""
    if built < min_fill * target:
        raise FillError(built, target, min_fill)
