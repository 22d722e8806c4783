"""A small decoder language model that takes any encoding; a Hugging Face model in every respect.

    config = MilepostConfig(width=256, num_layers=4, num_heads=4, encoding="alibi:slope_scale=2")
    model = MilepostForCausalLM(config)
    model.generate(input_ids, max_new_tokens=20)

Importing this module registers it with ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from milepost.attention import attend
from milepost.encoding import Encoding, Mapped, Sum, from_spec
from milepost.positions import Positions
from milepost.terms import Terms


class MilepostConfig(PreTrainedConfig):
    """Configuration of :class:`MilepostForCausalLM`, under the field's names or Hugging Face's (``attribute_map``).

    ``encoding`` is a line for :func:`milepost.encoding.from_spec`: ``"rope"``, ``"alibi:slope_scale=2"``, the sum
    ``"sinusoidal+alibi"``, the schedule ``"rope/rope/rope/nope"``. ``share_encoding``: one set for all layers, or one a
    layer; None is as published. ``trained_length`` is only told to encodings; the model reads any length.
    ``padding_side`` is what a compiled graph may believe of masks; outside compilation it is found from the mask.

    Raises:
        ValueError: heads that do not divide, a negative size, or an unknown choice; all errors at once.
        TypeError: an option that does not exist.
    """

    model_type: ClassVar[str] = "milepost"
    attribute_map: ClassVar[dict[str, str]] = {
        "width": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "inner_width": "intermediate_size",
        "trained_length": "max_position_embeddings",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    vocab_size: int = 258
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 512
    encoding: str = "rope"
    share_encoding: bool | None = None
    block: Literal["pre", "post"] = "pre"
    norm: Literal["layer", "rms"] = "layer"
    activation: Literal["swiglu", "gelu", "relu"] = "swiglu"
    bias: bool = False
    causal: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    padding_side: Literal["left", "right"] | None = None
    pad_token_id: int | None = 256
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 257
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name in self.attribute_map]:
            setattr(self, name, kwargs.pop(name))
        for name in kwargs:
            near = difflib.get_close_matches(name, [f.name for f in fields(self)] + [*self.attribute_map], 1, 0.8)
            if near and near[0] != name:
                raise TypeError(f"MilepostConfig has no option {name!r}; did you mean {near[0]!r}?")
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            gated = self.activation == "swiglu"
            self.intermediate_size = 32 * round(self.hidden_size / 12) if gated else 4 * self.hidden_size
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(self, name)
            if isinstance(token, int) and token >= self.vocab_size:
                setattr(self, name, None)
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or 0
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        wrong = [f"{name} is at least 1; got {getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        if not wrong and self.head_dim == self.hidden_size // heads and self.hidden_size % heads:
            wrong.append(f"width {self.hidden_size} does not divide into {heads} heads; choose another or set head_dim")
        if kv_heads < 1 or heads % kv_heads:
            wrong.append(f"num_kv_heads divides num_heads {heads}; got {kv_heads}")
        choices: dict[str, tuple[str | None, ...]] = {
            "block": ("pre", "post"),
            "norm": ("layer", "rms"),
            "activation": ("swiglu", "gelu", "relu"),
            "padding_side": ("left", "right", None),
        }
        wrong += [
            f"{name} is one of {allowed}; got {getattr(self, name)!r}"
            for name, allowed in choices.items()
            if getattr(self, name) not in allowed
        ]
        wrong += [
            f"{name} is in [0, 1); got {getattr(self, name)}"
            for name in ("dropout", "attention_dropout")
            if not 0 <= getattr(self, name) < 1
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    def geometry(self) -> dict[str, Any]:
        """What an encoding may ask of a model."""
        return {
            "num_heads": self.num_attention_heads,
            "head_dim": self.head_dim,
            "width": self.hidden_size,
            "num_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "trained_length": self.max_position_embeddings,
        }


class Attention(nn.Module):
    """Grouped-query attention over the sequence itself; everything about position is in ``terms``."""

    def __init__(self, config: MilepostConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.dropout = layer, config.head_dim, config.attention_dropout
        self.sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv_proj = nn.Linear(config.width, sum(self.sizes), bias=config.bias)
        self.o_proj = nn.Linear(self.sizes[0], config.width, bias=config.bias)

    def forward(self, x: Tensor, positions: Positions, terms: Terms, cache: Cache | None) -> Tensor:
        parts = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if cache is not None:
            k, v = cache.update(*terms.prepare(k, v), self.layer)
            if _is_static(cache):
                k, v = k[:, :, : positions.num_keys], v[:, :, : positions.num_keys]
        prepared = cache is not None and terms.rotated_keys_cacheable
        dropout = self.dropout if self.training else 0.0
        out = attend(q, k, v, positions, terms, dropout=dropout, prepared=prepared)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU, or two layers with GELU or ReLU between them."""

    def __init__(self, config: MilepostConfig) -> None:
        super().__init__()
        self.activation = config.activation
        gates = 2 if config.activation == "swiglu" else 1
        self.up_proj = nn.Linear(config.width, gates * config.inner_width, bias=config.bias)
        self.down_proj = nn.Linear(config.inner_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_proj(x)
        if self.activation == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x) if self.activation == "gelu" else F.relu(x)
        return self.down_proj(x)


class Block(GradientCheckpointingLayer):
    """Attention and feed-forward, each with its residual; the norm stands before them (``pre``) or after (``post``).

    A ``post`` block with ReLU, bias and ``causal=False`` is ``torch.nn.TransformerEncoderLayer``.
    """

    def __init__(self, config: MilepostConfig, layer: int) -> None:
        super().__init__()
        self.post = config.block == "post"
        self.attention, self.feed_forward = Attention(config, layer), FeedForward(config)
        self.norm1, self.norm2 = _norm(config), _norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Positions, terms: Terms, cache: Cache | None = None) -> Tensor:
        if self.post:
            x = self.norm1(x + self.dropout(self.attention(x, positions, terms, cache)))
            return self.norm2(x + self.dropout(self.feed_forward(x)))
        x = x + self.dropout(self.attention(self.norm1(x), positions, terms, cache))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class MilepostPreTrainedModel(PreTrainedModel):
    """What Hugging Face must know: initialisation, and that an encoding's parameters stay float32."""

    config_class = MilepostConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _keep_in_fp32_modules_strict: ClassVar[set[str]] = {"encodings"}
    _can_compile_fullgraph = True
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range); projections into the residual stream are divided by sqrt(2 x layers)."""
        if isinstance(module, Encoding):
            loaded = {p: p.clone() for p in module.parameters() if getattr(p, "_is_hf_initialized", False)}
            module.reset_parameters()
            for parameter, value in loaded.items():
                parameter.copy_(value)
        elif isinstance(module, Block) and not module.post:
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_layers)
            for projection in (module.attention.o_proj, module.feed_forward.down_proj):
                init.normal_(projection.weight, std=std)
        else:
            super()._init_weights(module)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        function = kwargs.get("gradient_checkpointing_func", args[0] if args else None)
        if enable and getattr(function, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True loses the gradients of encodings: their parameters reach the layers inside Terms; "
                "pass gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        super()._set_gradient_checkpointing(enable, *args, **kwargs)


class MilepostModel(MilepostPreTrainedModel):
    """The trunk: embeddings, blocks, final norm, and the encodings.

    ``encodings`` holds every distinct encoding once; ``schedule[layer]`` names those a layer uses. Terms are computed
    once per forward pass for each distinct entry of the schedule.
    """

    def __init__(self, config: MilepostConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.Identity() if config.block == "post" else _norm(config)
        # Last, and under a generator of their own, so that one seed gives the same trunk under every encoding.
        self.encodings, self.schedule, self.originals = _lay_out(config)
        self.post_init()

    def set_encoding(self, encoding: str) -> None:
        """Change an encoding's options in place (a curriculum's frequencies); parameters stay the same objects.

        Raises:
            ValueError: the new encoding has other parameters than the old one.
        """
        config = copy.deepcopy(self.config)
        config.encoding = encoding
        encodings, schedule, originals = _lay_out(config)
        old, new = dict(self.encodings.named_parameters()), dict(encodings.named_parameters())
        if {name: p.shape for name, p in old.items()} != {name: p.shape for name, p in new.items()}:
            raise ValueError(f"{encoding!r} has other parameters than {self.config.encoding!r}; train a new model")
        for name, parameter in old.items():
            owner, _, leaf = name.rpartition(".")
            setattr(encodings.get_submodule(owner), leaf, parameter)
        self.encodings, self.schedule, self.originals = encodings, schedule, originals
        self.config.encoding = encoding

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> list[Terms]:
        """The :class:`~milepost.terms.Terms` of each layer."""
        parts = [encoding(positions, tokens) for encoding in self.encodings]
        sums: dict[tuple[int, ...], Terms] = {}
        for indices in self.schedule:
            if indices not in sums:
                total = parts[indices[0]]
                for index in indices[1:]:
                    total = total + parts[index]
                sums[indices] = total
        return [sums[indices] for indices in self.schedule]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        context_tokens: Tensor | None = None,
        padding_side: str | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states ``(B, Q, width)``.

        Args:
            input_ids: ``(B, Q)`` new tokens; or ``inputs_embeds`` ``(B, Q, width)``.
            attention_mask: ``(B, K)``, 0 = padding, over cached and new tokens.
            position_ids: ``(B, K)`` of all tokens, where they are not the count of tokens (slower: tables need that).
            cache: a ``DynamicCache`` or ``StaticCache``; ``use_cache=True`` makes the former.
            token_type_ids: ``(B, Q)`` segments, for encodings that read them.
            document_ids: ``(B, K)`` for packed rows: attention and positions stay inside a document.
            context_tokens: ``(B, K)`` ids of all tokens; needed with a cache by encodings that read tokens.
            padding_side: of the mask, where ``torch.compile`` cannot look (default: the configuration's).

        Raises:
            ValueError: inputs that do not fit each other; each message says how to mend it.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of them")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache()
        positions = _positions(x, cache, attention_mask, position_ids, document_ids, padding_side, self.config)
        tokens = context_tokens
        if any(encoding.needs_tokens for encoding in self.encodings):
            tokens = _all_tokens(input_ids if tokens is None else tokens, positions, cache)
        for index in self.originals:
            encoding = self.encodings[index]
            x = encoding.embed(x, positions, tokens, **_segments(encoding, token_type_ids))
        x = self.dropout(x)
        states = [x]
        for layer, terms in zip(self.layers, self.terms(positions, tokens), strict=True):
            x = layer(x, positions, terms, cache=cache)
            states.append(x)
        x = states[-1] = self.norm(x)
        kept = tuple(states) if output_hidden_states else None
        output = BaseModelOutputWithPast(last_hidden_state=x, cache=cache, hidden_states=kept)
        return output.to_tuple() if return_dict is False else output


class MilepostForCausalLM(MilepostPreTrainedModel, GenerationMixin):
    """The trunk with a language-modelling head: loss, ``generate``, ``save_pretrained``, as of any Hugging Face model."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True

    def __init__(self, config: MilepostConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.model = MilepostModel(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        context_tokens: Tensor | None = None,
        padding_side: str | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits ``(B, Q, vocab)`` and, with ``labels`` (shifted here; -100 = not counted), the mean loss.

        ``logits_to_keep``: the last so many positions, or their indices; 0 keeps all. The rest as in
        :meth:`MilepostModel.forward`.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            token_type_ids=token_type_ids,
            document_ids=document_ids,
            context_tokens=context_tokens,
            padding_side=padding_side,
            output_hidden_states=output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            size = self.config.vocab_size
            loss = self.loss_function(logits, labels, vocab_size=size, num_items_in_batch=num_items_in_batch)
        states = outputs.hidden_states
        output = CausalLMOutputWithPast(loss=loss, logits=logits, cache=outputs.cache, hidden_states=states)
        return output.to_tuple() if return_dict is False else output

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """None: the forward pass counts them from the mask, and so knows that they are plain."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The new tokens, the 2-D mask with the side of its padding, and all tokens where an encoding reads them."""
        inputs: dict[str, Any] = {"cache": cache, **kwargs}
        new = input_ids.shape[1] if next_sequence_length is None else next_sequence_length
        if inputs_embeds is not None and is_first_iteration:
            new = inputs_embeds.shape[1] if next_sequence_length is None else next_sequence_length
            inputs["inputs_embeds"] = inputs_embeds[:, -new:]
        else:
            inputs["input_ids"] = input_ids[:, -new:].contiguous()
        if any(encoding.needs_tokens for encoding in self.model.encodings):
            inputs.setdefault("context_tokens", _to_capacity(input_ids, cache, 0))
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids[:, -new:]
        if attention_mask is not None:
            inputs["padding_side"] = padding_of(attention_mask)
            inputs["attention_mask"] = _to_capacity(attention_mask, cache, 1)
        return inputs


class CrossAttention(nn.Module):
    """Attention from one sequence to another, with the encoding's relative signal where the two share an origin.

    ``aligned``: position 0 is the same place in both (two views of one signal). Otherwise the distance between them
    means nothing, and an encoding that acts in attention is refused (one that acts on embeddings is at home in both
    sequences). An encoding for causal attention alone refuses by itself.

    Shapes: x ``(B, Q, width)``, memory ``(B, K, width)``, memory_mask ``(B, K)`` with 0 = padding; returns x's shape.
    """

    def __init__(self, config: MilepostConfig, encoding: Encoding | None = None, *, aligned: bool = True) -> None:
        super().__init__()
        self.aligned, self.head_dim, self.encoding = aligned, config.head_dim, encoding
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, size, bias=config.bias)
        self.kv_proj = nn.Linear(config.width, 2 * kv_size, bias=config.bias)
        self.o_proj = nn.Linear(size, config.width, bias=config.bias)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        positions = Positions.cross(x.shape[1], memory.shape[1], device=x.device)
        terms = Terms() if self.encoding is None else self.encoding(positions)
        if not self.aligned and not terms.is_empty():
            raise ValueError(
                f"{terms.name} reads distances between two sequences that share no origin; "
                "pass aligned=True if they do, or give each sequence an absolute encoding"
            )
        if memory_mask is not None:
            positions = replace(positions, key_present=memory_mask.bool())
        parts = (self.q_proj(x), *self.kv_proj(memory).chunk(2, dim=-1))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return self.o_proj(attend(q, k, v, positions, terms).transpose(1, 2).flatten(2))


# ---- positions and encodings of a forward pass ----------------------------------------------------------------------


def padding_of(mask: Tensor) -> Literal["none", "left", "right", "holes"]:
    """Where the zeros of a ``(B, K)`` mask stand. Looks at the values: one synchronisation on accelerators."""
    present = mask.bool()
    steps = present[:, 1:].int() - present[:, :-1].int()
    full, rises, falls = torch.stack([present.all(), (steps > 0).any(), (steps < 0).any()]).tolist()
    return "none" if full else "holes" if rises and falls else "left" if rises else "right"


def _positions(
    x: Tensor,
    cache: Cache | None,
    mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    side: str | None,
    config: MilepostConfig,
) -> Positions:
    """Where the new tokens ``x`` and all keys stand. A static cache's start stays on the device."""
    queries, device = x.shape[1], x.device
    start: int | Tensor = 0 if cache is None else cache.get_seq_length()
    static = isinstance(start, Tensor)
    if isinstance(start, Tensor):
        start = start.to(device).reshape(1).clone()  # the cache counts on in place
        keys = cache.get_max_length() if cache is not None else queries
    else:
        keys = start + queries
    known: dict[str, Any] = {"causal": config.causal, "trained_length": config.trained_length}
    if mask is not None and not torch.compiler.is_compiling():
        side = padding_of(mask) if side is None else side
        mask = None if side == "none" else mask
    elif side is None:
        side = config.padding_side
    for name, given in (("attention_mask", mask), ("position_ids", position_ids), ("document_ids", document_ids)):
        if given is not None and not static and given.shape[1] != keys:
            raise ValueError(f"{name} covers all {keys} tokens, cached and new; got shape {tuple(given.shape)}")
    if document_ids is not None:
        if static or position_ids is not None or side == "holes":
            raise ValueError("document_ids go with neither a static cache, position_ids, nor a mask with holes")
        if mask is not None:
            document_ids = document_ids.masked_fill(mask == 0, -1)
        return Positions.from_documents(document_ids, queries=queries, key_present=mask, **known)
    if mask is None and position_ids is None:
        key = torch.arange(keys, device=device)[None]
        query = torch.arange(queries, device=device)[None] + start
        length = query[:, -1] + 1
        return Positions(query=query, key=key, query_start=start, length=length, slot_distance=True, **known)
    mask = torch.ones(x.shape[0], keys, device=device, dtype=torch.bool) if mask is None else mask
    if static:
        mask = F.pad(mask, (0, keys - mask.shape[1]), value=1)
        if position_ids is not None:
            position_ids = F.pad(position_ids, (0, keys - position_ids.shape[1]))
    side = side if side in ("left", "right") else None
    positions = Positions.from_mask(
        mask, side=side, queries=queries, query_start=start, position_ids=position_ids, **known
    )
    return replace(positions, length=positions.query[:, -1] + 1) if static else positions


def _all_tokens(tokens: Tensor | None, positions: Positions, cache: Cache | None) -> Tensor:
    if tokens is not None and cache is not None and isinstance(positions.query_start, Tensor):
        tokens = _to_capacity(tokens, cache, 0)
    if tokens is None or tokens.shape[1] != positions.num_keys:
        raise ValueError(
            f"this encoding reads the ids of all {positions.num_keys} tokens, cached and new; "
            f"got {'none' if tokens is None else tokens.shape[1]}: pass context_tokens"
        )
    return tokens


def _segments(encoding: Encoding, token_type_ids: Tensor | None) -> dict[str, Tensor]:
    reads = getattr(encoding, "needs_segments", False)
    return {"segments": token_type_ids} if reads and token_type_ids is not None else {}


def _is_static(cache: Cache | None) -> bool:
    return cache is not None and len(cache.layers) > 0 and cache.is_compileable


def _to_capacity(tokens: Tensor, cache: Cache | None, value: int) -> Tensor:
    """Padded to a static cache's size, so that a compiled step sees one shape; unchanged for any other cache."""
    if cache is None or not _is_static(cache):
        return tokens
    return F.pad(tokens, (0, max(cache.get_max_length() - tokens.shape[1], 0)), value=value)


def _norm(config: MilepostConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


def _lay_out(config: MilepostConfig) -> tuple[nn.ModuleList, list[tuple[int, ...]], list[int]]:
    """The distinct encodings, which of them each layer uses, and the first of each kind (those that embed)."""
    modules: list[Encoding] = []
    schedule: list[tuple[int, ...]] = []
    first: dict[Encoding, int] = {}
    with _float32_and_own_generator():
        base = from_spec(config.encoding, config.geometry())
        for layer in range(config.num_layers):
            indices = []
            for part in _parts(base, layer):
                if part not in first:
                    first[part] = len(modules)
                    modules.append(part)
                elif not _is_shared(part, config.share_encoding):
                    modules.append(copy.deepcopy(part))
                    modules[-1].reset_parameters()
                    indices.append(len(modules) - 1)
                    continue
                indices.append(first[part])
            schedule.append(tuple(indices))
    return nn.ModuleList(modules), schedule, list(first.values())


def _parts(encoding: Encoding, layer: int) -> Iterator[Encoding]:
    encoding = encoding.for_layer(layer)
    if isinstance(encoding, Sum):
        for part in encoding.parts:
            yield from _parts(part, layer)  # type: ignore[arg-type]  # ModuleList hides the class
    else:
        yield encoding


def _is_shared(encoding: Encoding, share: bool | None) -> bool:
    while isinstance(encoding, Mapped):
        encoding = encoding.encoding
    info = encoding.info
    if info is None or info.injection == "initial":
        return True
    return info.shared if share is None else share


@contextlib.contextmanager
def _float32_and_own_generator() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(before, torch.float32))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(before)


AutoConfig.register(MilepostConfig.model_type, MilepostConfig, exist_ok=True)
AutoModel.register(MilepostConfig, MilepostModel, exist_ok=True)
AutoModelForCausalLM.register(MilepostConfig, MilepostForCausalLM, exist_ok=True)
