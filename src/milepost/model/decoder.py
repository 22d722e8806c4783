"""The decoder: attention, feed-forward, block, trunk, and the language model around it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from milepost.attention import attend
from milepost.encoding import Encoding
from milepost.model.cache import DecodingCache, known_bound
from milepost.model.config import MilepostConfig
from milepost.model.inputs import all_tokens, is_static, padding_of, positions_of, to_capacity
from milepost.model.layout import lay_out
from milepost.positions import Positions
from milepost.terms import Terms


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
            if is_static(cache):
                k, v = k[:, :, : positions.num_keys], v[:, :, : positions.num_keys]
        prepared = cache is not None and terms.rotated_keys_cacheable
        dropout = self.dropout if self.training else 0.0
        bound = known_bound(cache, self.layer, q, terms)
        out = attend(q, k, v, positions, terms, dropout=dropout, prepared=prepared, key_bound=bound)
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


def _norm(config: MilepostConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


class MilepostPreTrainedModel(PreTrainedModel):
    """What Hugging Face must know: initialisation, and that an encoding's parameters stay float32."""

    config_class = MilepostConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _keep_in_fp32_modules_strict: ClassVar[set[str]] = {"encodings"}
    _can_compile_fullgraph = True
    _supports_sdpa = True

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Every module, those without parameters of their own too: a block and an encoding initialise their parts."""
        super()._initialize_weights(module)

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
        self.encodings, self.schedule, self.originals = lay_out(config)
        self.post_init()

    def set_encoding(self, encoding: str) -> None:
        """Change an encoding's options in place (a curriculum's frequencies); parameters stay the same objects.

        Raises:
            ValueError: the new encoding has other parameters than the old one.
        """
        config = copy.deepcopy(self.config)
        config.encoding = encoding
        encodings, schedule, originals = lay_out(config)
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
            cache: a ``DynamicCache`` or ``StaticCache``; ``use_cache=True`` makes a
                :class:`~milepost.model.cache.DecodingCache`, a faster one of the former kind.
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
            cache = DecodingCache(self.config.num_layers)
        positions = positions_of(x, cache, attention_mask, position_ids, document_ids, padding_side, self.config)
        if token_type_ids is not None:
            positions = replace(positions, query_segment=token_type_ids)
        tokens = context_tokens
        if any(encoding.needs_tokens for encoding in self.encodings):
            tokens = all_tokens(input_ids if tokens is None else tokens, positions, cache)
        for index in self.originals:
            x = self.encodings[index].embed(x, positions, tokens)  # type: ignore[operator]  # ModuleList hides the class
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
    """The trunk with a language-modelling head: loss, ``generate`` and the rest of a Hugging Face model."""

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

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """A :class:`DecodingCache` where `generate` would make a ``DynamicCache``."""
        given = model_kwargs.get("cache")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get("cache")
        if made is not None and made is not given and type(made) is DynamicCache and not made.offloading:
            model_kwargs["cache"] = DecodingCache(self.config.num_layers)

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
            inputs.setdefault("context_tokens", to_capacity(input_ids, cache, 0))
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids[:, -new:]
        if attention_mask is not None:
            inputs["padding_side"] = padding_of(attention_mask)
            inputs["attention_mask"] = to_capacity(attention_mask, cache, 1)
        return inputs
