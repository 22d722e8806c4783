"""What a check reports, and the view of a document that checks read."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milepost.encodings.frequencies.base import is_number
from milepost.extend.doctor.classes import HEAD_DIMS, LAYERED, ORIGINALS, PARTIALS, THETAS
from milepost.extend.doctor.rules import RULES, Severity

Path = tuple[str, ...]

ROTARY = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
        *("olmo", "olmo2", "olmo3", "granite", "smollm3", "cohere", "cohere2", "gpt_oss", "starcoder2", "ministral3"),
        *("gpt_neox", "phi", "phi3", "stablelm", "falcon", "persimmon", "glm", "glm4", "deepseek_v2"),
        *("deepseek_v3", "llama4_text", "internlm2", "baichuan", "qwen", "yi"),
    }
)
"""Model types that rotate by a configured base even where the file says nothing about it."""


class _Delete:
    """Marker: the key goes away."""

    def __repr__(self) -> str:
        return "DELETE"


DELETE = _Delete()


@dataclass(frozen=True, kw_only=True)
class Change:
    """One edit of a document: the value at ``path`` becomes ``value`` (or disappears)."""

    path: Path
    value: Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One rule that a document breaks, in words, with the cure where there is one."""

    rule: str
    words: str
    fix: str | None = None
    where: Path = ()
    changes: tuple[Change, ...] = ()

    @property
    def severity(self) -> Severity:
        return RULES[self.rule].severity

    @property
    def page(self) -> str:
        """The rule's page in the documentation."""
        return f"docs/doctor/{self.rule}.md"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "id": self.rule,
            "severity": self.severity,
            "where": ".".join(self.where),
            "words": self.words,
            "fix": self.fix,
            "page": self.page,
        }


def short(value: Any) -> str:
    """A value in at most 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    return value if is_number(value) else None


def whole(value: Any) -> int | None:
    """The value as an int if it is a whole number above 0, else None."""
    found = number(value)
    return int(found) if found is not None and found > 0 and found == int(found) else None


def figure(value: float) -> str:
    """A number as people write it: 1000000 and 0.25, not 1e+06."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.10g}"


@dataclass(frozen=True, kw_only=True)
class View:
    """One rope block of a document, with the configuration around it; every value as it stands in the file."""

    config: Mapping[str, Any]
    block: Mapping[str, Any]
    path: Path = ()
    config_path: Path = ()
    layer_type: str | None = None
    kind: str = "config"
    checkpoint: Mapping[str, Any] | None = None
    replace_trained: bool = False
    stated: bool = field(default=True)
    """False where the document has no rope block at all."""
    trained_base: float | None = None
    """The base that a checkpoint was trained with, where an override may say another."""
    derived: bool = False
    """True for a block that the model class makes by itself: described, not checked."""

    def get(self, *names: str) -> Any:
        """The first of these keys of the configuration that is there and not null."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), None)

    def at(self, key: str) -> Path:
        """The path of a key of the block."""
        return (*self.path, key)

    def top(self, key: str) -> Path:
        """The path of a key of the configuration."""
        return (*self.config_path, key)

    @property
    def type(self) -> str | None:
        """The block's type, lower case, aliases resolved; None where it names none or no text."""
        found = self.block.get("rope_type")
        found = self.block.get("type") if found is None else found
        if found is None and set(self.block) <= {"rope_theta", "partial_rotary_factor"}:
            return "default"
        if not isinstance(found, str):
            return None
        return {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}.get(found.lower(), found.lower())

    @property
    def model_type(self) -> str:
        """The model type, empty where the file names none."""
        found = self.config.get("model_type")
        return found if isinstance(found, str) else ""

    @property
    def rotary(self) -> bool:
        """Whether anything says that positions are rotary: a block, a base, the kind of document, the model type."""
        if self.stated or self.theta is not None or self.kind != "config" or not self.model_type:
            return True
        return (self.model_type in ROTARY or self.model_type in LAYERED) and self.config.get("alibi") is not True

    @property
    def theta(self) -> Any:
        """The base, wherever it stands."""
        found = self.block.get("rope_theta")
        return self.get("rope_theta", "rotary_emb_base") if found is None else found

    @property
    def base(self) -> float | None:
        """The base that is used: the stated one, the class's where none is; None where it is no number."""
        return THETAS.get(self.model_type, 10000.0) if self.theta is None else number(self.theta)

    @property
    def max_length(self) -> int | None:
        found = whole(self.get("max_position_embeddings", "n_positions"))
        if found is None and self.kind == "override" and self.checkpoint is not None:
            return whole(self.checkpoint.get("max_position_embeddings"))
        return found

    @property
    def original(self) -> int | None:
        """The original length, from the block, beside it, or the class's own."""
        inner = whole(self.block.get("original_max_position_embeddings"))
        return inner if inner is not None else self.original_at_top

    @property
    def original_at_top(self) -> int | None:
        """The original length that wins over the block's: stated beside it, or the class's own."""
        found = whole(self.get("original_max_position_embeddings")) if self.path != self.config_path else None
        return found if found is not None else ORIGINALS.get(self.model_type)

    @property
    def factor(self) -> float | None:
        return number(self.block.get("factor"))

    @property
    def partial(self) -> float | None:
        found = number(self.block.get("partial_rotary_factor"))
        if found is None:
            found = number(self.get("partial_rotary_factor", "rotary_pct", "rope_pct"))
        width, head_dim = whole(self.config.get("rotary_dim")), self.head_dim
        if found is None and width is not None and head_dim is not None and width <= head_dim:
            return width / head_dim
        return PARTIALS.get(self.model_type) if found is None else found

    @property
    def head_dim(self) -> int | None:
        found = whole(self.get("qk_rope_head_dim", "head_dim", "kv_channels"))
        if found is None and "head_dim" not in self.config:
            found = HEAD_DIMS.get(self.model_type)
        if found is not None:
            return found
        hidden, heads = whole(self.get("hidden_size", "n_embd")), whole(self.get("num_attention_heads", "n_head"))
        return hidden // heads if hidden and heads and hidden >= heads else None

    @property
    def rotary_dim(self) -> int | None:
        head_dim, partial = self.head_dim, self.partial
        if head_dim is None or partial is None or not 0 < partial <= 1 or self.type == "proportional":
            return head_dim
        return int(head_dim * partial)


def as_its_class_reads(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the head's width and rotated share that its class takes where the file states none."""
    view = View(config=config, block={}, stated=False)
    head_dim, stated = view.head_dim, {"head_dim", "qk_rope_head_dim", "kv_channels"} & set(config)
    width = {} if stated or head_dim is None or view.model_type not in HEAD_DIMS else {"head_dim": head_dim}
    share = view.partial
    blocks = [config[name] for name in ("rope_parameters", "rope_scaling") if isinstance(config.get(name), dict)]
    named = any("partial_rotary_factor" in block for block in blocks) or share is None
    named = named or view.get("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_dim") is not None
    return {**config, **width, **({} if named else {"partial_rotary_factor": share})}


def apply(document: Any, changes: Iterable[Change]) -> Any:
    """A copy of a document with changes made; a path that is not there is created, or left alone when deleted."""
    document = copy.deepcopy(document)
    for change in changes:
        if not change.path:
            document = change.value
            continue
        place = document
        for key in change.path[:-1]:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        if isinstance(change.value, _Delete):
            place.pop(change.path[-1], None)
        else:
            place[change.path[-1]] = change.value
    return document


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
