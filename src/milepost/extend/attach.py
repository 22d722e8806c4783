"""Put any encoding into a pretrained Hugging Face decoder, without touching its code.

The model's own rotation is made the identity, so that its cache holds keys as they were projected, and one attention
function does everything that depends on positions. That makes methods right with a cache that need raw keys.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from milepost.attention import attend
from milepost.encoding import Encoding
from milepost.encodings.frequencies import FrequencyMethod
from milepost.extend.choose import encodings_for, trained_length_of
from milepost.extend.own_attention import attention_modules, put, route
from milepost.extend.probe import (
    LayerRotation,
    decoder_of,
    layer_rotations,
    make_identity,
    rotary_modules,
    text_config,
)
from milepost.positions import Positions
from milepost.terms import Terms

_COUNTER = itertools.count()
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attachment]] = weakref.WeakKeyDictionary()
MODULE_NAME = "milepost_encodings"
"""Under this name the encodings are part of the model while attached, so that they are trained, moved and saved."""
ABSOLUTE = ("wpe", "embed_positions", "position_embeddings", "wpe_embeddings")
"""Attribute names of learned position tables in Hugging Face decoders."""


@dataclass(frozen=True, eq=False)
class Call:
    """What one forward pass of a model means for one kind of mask: carried by the mask tensor to every layer."""

    positions: Positions
    terms: dict[int, Terms]


class _Now(threading.local):
    """What one thread is doing with the model: several may use it at once.

    Attributes:
        new_tokens: that rows will grow by, as `Attachment.expect` was told.
        growth, prompt: new tokens of the `generate` at work, and those it was given.
        rows: ``(B,)`` each row's length when that `generate` ends.
        inputs: of the forward pass at work.
    """

    def __init__(self) -> None:
        self.new_tokens = 0
        self.growth = self.prompt = 0
        self.rows: Tensor | None = None
        self.inputs: dict[str, Any] = {}


class Attachment:
    """An encoding at work in a model; ``detach()`` (or leaving the ``with`` block) restores the model exactly.

    Attributes:
        model: the model.
        rotations: what each layer did by itself.
        encodings: what each layer does now.
    """

    def __init__(
        self,
        model: Any,
        encodings: dict[int, Encoding],
        rotations: dict[int, LayerRotation],
        *,
        length: int | str,
        keep_absolute: bool,
        backend: str,
        trained_length: int | None,
    ) -> None:
        self.model = model
        self.encodings = encodings
        self.rotations = rotations
        self.length = length
        self.backend = backend
        self.trained_length = trained_length
        self.key = f"milepost-{next(_COUNTER)}"
        self._now = _Now()
        self._by_cache: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []
        self._install(keep_absolute)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        names = dict.fromkeys(encoding.name for encoding in self.encodings.values())
        return f"Attachment({type(self.model).__name__}, {', '.join(names)}, length={self.length!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a model cannot be copied or pickled with an encoding attached: the copy would attend through the "
            "original. Call detach first and attach to the copy (save_pretrained and state_dict work while attached)"
        )

    @contextmanager
    def expect(self, new_tokens: int) -> Iterator[None]:
        """Inside, rows will grow by this many tokens: what ``length="fixed"`` counts on outside ``generate``."""
        before, self._now.new_tokens = self._now.new_tokens, new_tokens
        try:
            yield
        finally:
            self._now.new_tokens = before

    def detach(self) -> None:
        """Restore the model. Safe to call twice."""
        while self._undo:
            self._undo.pop()()
        if attached_to(self.model) is self:
            del _ATTACHED[self.model]

    # ---- installation -----------------------------------------------------------------------------------------------

    def _install(self, keep_absolute: bool) -> None:
        from transformers import GenerationMixin
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        model, key = self.model, self.key
        for module in rotary_modules(model):
            self._undo.append(make_identity(module))
        if not keep_absolute:
            for name, module in model.named_modules():
                if name.rsplit(".", 1)[-1] in ABSOLUTE and isinstance(module, nn.Embedding):
                    self._undo.append(_silence(module))
        before = model.config._attn_implementation
        # Weakly: the registries outlive a model that is dropped while attached, and must not keep it in memory.
        # While they are called its model runs, and holds it.
        me: Any = weakref.ref(self)
        AttentionInterface.register(key, lambda *args, **kwargs: me()._attention(*args, **kwargs))
        AttentionMaskInterface.register(key, lambda *args, **kwargs: me()._mask(*args, **kwargs))
        forget = weakref.finalize(self, _unregister, key)
        self._undo.append(lambda: forget() and None)
        own = attention_modules(model)
        for module in own.values():
            self._undo.append(route(module, self._attention))
        if own:
            model.config._attn_implementation = key
            self._undo.append(lambda: setattr(model.config, "_attn_implementation", before))
        else:
            model.set_attn_implementation(key)
            self._undo.append(lambda: model.set_attn_implementation(before))
        decoder = decoder_of(model)
        self._undo.append(decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
        self._undo.append(decoder.register_forward_hook(self._after_forward).remove)
        parts = nn.ModuleList(dict.fromkeys(self.encodings.values()))
        model.add_module(MODULE_NAME, parts.train(model.training).to(model.device))
        self._undo.append(lambda: delattr(model, MODULE_NAME))
        for module in model.modules():  # a wrapper (PEFT's) hands generate on to one of its modules
            if isinstance(module, GenerationMixin):
                self._wrap_generate(module)
        _ATTACHED[model] = me

    def _wrap_generate(self, module: Any) -> None:
        """Learn from `generate` itself how long each row becomes: it knows its defaults, beams and masks best."""
        from transformers.generation.configuration_utils import GenerationMode

        now, generate = self._now, module.generate
        measure, prepare = module._prepare_generated_length, module._prepare_cache_for_generation
        of_measure, of_prepare = inspect.signature(measure), inspect.signature(prepare)

        def generating(*args: Any, **kwargs: Any) -> Any:
            now.rows, now.inputs = None, {}
            try:
                return generate(*args, **kwargs)
            finally:
                now.rows = None

        def measuring(*args: Any, **kwargs: Any) -> Any:
            config = measure(*args, **kwargs)
            given = of_measure.bind(*args, **kwargs).arguments
            now.growth = config.max_length - given["input_ids_length"]
            now.prompt = given["inputs_tensor"].shape[1]
            return config

        def preparing(*args: Any, **kwargs: Any) -> Any:
            given = of_prepare.bind(*args, **kwargs).arguments
            more = given.get("kwargs", {})
            mode = given.get("generation_mode", more.get("generation_mode"))
            if mode == GenerationMode.ASSISTED_GENERATION:
                raise ValueError(
                    "assisted decoding crops the cache and reruns tokens, which changes what length-dependent "
                    "encodings see; call generate without assistant_model and prompt_lookup_num_tokens"
                )
            if self.length == "fixed":
                mask = given["model_kwargs"].get("attention_mask")  # None where there is no padding
                unpadded = getattr(given["generation_config"], "_mask_length", None) or now.prompt
                now.rows = (torch.tensor([unpadded]) if mask is None else mask.sum(-1)) + now.growth
            return prepare(*args, **kwargs)

        self._undo.append(put(module, "generate", generating))
        self._undo.append(put(module, "_prepare_generated_length", measuring))
        self._undo.append(put(module, "_prepare_cache_for_generation", preparing))

    # ---- one forward pass -------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._now.inputs = {
            "cache": kwargs.get("cache", kwargs.get("past_key_values")),
            "position_ids": kwargs.get("position_ids"),
        }
        config: Any = module.config
        if config._attn_implementation != self.key:
            raise ValueError(
                f"the attention of {type(self.model).__name__} was set to {config._attn_implementation!r} while "
                f"{self!r} is attached, so no layer would know positions; detach, set it, and attach again"
            )
        if torch.is_grad_enabled() and module.training and not torch.compiler.is_compiling():
            self._check_checkpointing(module)

    def _after_forward(self, *_: Any) -> None:
        self._now.inputs = {}

    def _check_checkpointing(self, decoder: nn.Module) -> None:
        if not any(p.requires_grad for encoding in self.encodings.values() for p in encoding.parameters()):
            return
        for module in decoder.modules():
            if getattr(module, "gradient_checkpointing", False):
                options = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
                if options.get("use_reentrant"):
                    raise ValueError(
                        "gradient checkpointing with use_reentrant=True does not reach the parameters of an attached "
                        "encoding; pass gradient_checkpointing_kwargs={'use_reentrant': False}"
                    )
                return

    def _mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Any = None,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        config: Any = None,
        use_vmap: bool = False,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """A marker tensor that carries positions and terms to the layers (no mask of Q x K is ever made)."""
        if use_vmap:
            raise ValueError(
                f"{type(self.model).__name__} adds a mask rule of its own (for images, say), which an attached "
                "encoding cannot see; detach it for such inputs"
            )
        positions = self._positions(q_length, kv_length, q_offset, kv_offset, attention_mask, device)
        sliding = local_size == getattr(config, "sliding_window", None)
        local = Terms(window=local_size) if sliding else Terms(chunk=local_size)
        made: dict[int, Terms] = {}
        terms = {}
        for layer, encoding in self.encodings.items():
            if id(encoding) not in made:
                made[id(encoding)] = encoding(positions) + local
            terms[layer] = made[id(encoding)]
        # Four axes: transformers hands such a mask on as it is, where generate makes it ahead of the forward pass.
        marker = torch.empty(batch_size, 1, 0, 0, dtype=torch.bool, device=device)
        marker.milepost_call = Call(positions, terms)  # type: ignore[attr-defined]
        return marker

    def _positions(
        self,
        queries: int,
        keys: int,
        q_offset: int | Tensor,
        kv_offset: int,
        mask: Tensor | None,
        device: torch.device | None,
    ) -> Positions:
        start: int | Tensor = q_offset - kv_offset
        if isinstance(start, Tensor) and start.dim() == 0:
            start = start.view(1)
        given = self._now.inputs.get("position_ids")
        alone = isinstance(start, int) and start == 0 and keys == queries
        if mask is not None and bool(mask.all()):
            mask = None
        if mask is None:
            key = torch.arange(kv_offset, kv_offset + keys, device=device)[None]
            if alone and given is not None and given.dim() == 2 and given.shape[1] > 1:
                step = given[:, 1:] - given[:, :-1]
                if not bool((step == 1).all()):
                    return self._given(given, step)
            last = kv_offset + (start + queries if isinstance(start, int) else keys)
            query = (
                key[:, start : start + queries]
                if isinstance(start, int)
                else start + torch.arange(queries, device=device)[None] + kv_offset
            )
            positions = Positions(
                query=query,
                key=key,
                query_start=start,
                length=torch.full((1,), last, device=device),
                slot_distance=True,
            )
        else:
            seen = mask[:, kv_offset : kv_offset + keys]
            if seen.shape[1] < keys:
                seen = nn.functional.pad(seen, (0, keys - seen.shape[1]), value=True)
            positions = Positions.from_mask(seen, side=_side(seen), queries=queries, query_start=start)
            before = mask[:, :kv_offset].sum(-1, keepdim=True)
            if kv_offset:
                positions = replace(positions, query=positions.query + before, key=positions.key + before)
            positions = replace(positions, length=mask.sum(-1))
        if given is not None and given.dim() == 2 and not (alone and mask is None):
            _check_position_ids(given, positions, q_offset)
        return replace(positions, trained_length=self.trained_length, length=self._lengths(positions.length))

    def _given(self, given: Tensor, step: Tensor) -> Positions:
        """Positions the caller chose: a step back starts another document; skips forward stay in one (PoSE)."""
        if bool((step < 1).any()):
            run = torch.zeros_like(given)
            run[:, 1:] = (step < 1).cumsum(-1)
            positions = Positions.from_documents(run)
            if bool((step[step >= 1] == 1).all()):
                return replace(positions, trained_length=self.trained_length)
        else:
            positions = Positions.full(given.shape[1], device=given.device)
        length = self._lengths(given.amax(-1) + 1)
        return replace(positions.mapped(given, given, length=length), trained_length=self.trained_length)

    def _lengths(self, now: Tensor) -> Tensor:
        """The length that length-dependent encodings read, per row."""
        if isinstance(self.length, int):
            return torch.full_like(now, self.length)
        if self.length == "growing":
            return now
        if self._now.rows is not None:
            return self._now.rows.to(now.device)
        cache = self._now.inputs.get("cache")
        if cache is None:
            return now + self._now.new_tokens
        if cache not in self._by_cache:
            self._by_cache[cache] = now + self._now.new_tokens
        return torch.maximum(self._by_cache[cache], now)

    def _attention(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        call = getattr(attention_mask, "milepost_call", None)
        if call is None:
            raise ValueError(
                f"{type(self.model).__name__} was given a mask of its own making; with an attached encoding pass a "
                "2-D attention_mask (1 = token, 0 = padding) or none"
            )
        if s_aux is not None:
            raise ValueError(f"{type(self.model).__name__} has attention sinks (s_aux), which attach does not serve")
        layer = int(module.layer_idx)
        terms = call.terms[layer]
        bound = None if terms.bias is None else _key_bound(self._now.inputs.get("cache"), layer, k)
        out = attend(
            q, k, v, call.positions, terms, scale=scaling, dropout=dropout, softcap=softcap, backend=self.backend,
            key_bound=bound,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None


def attach(
    model: Any,
    encoding: str | Encoding | FrequencyMethod = "own",
    *,
    length: int | str = "fixed",
    keep_absolute: bool = False,
    backend: str = "auto",
    trained_length: int | None = None,
    **options: Any,
) -> Attachment:
    """Replace the position signal of a Hugging Face decoder: ``attach(model, "yarn", factor=4)``.

    Args:
        model: a decoder that uses transformers' attention interface (llama, mistral, qwen, gemma, phi, olmo, granite,
            smollm, gpt-neox, cohere, glm, llama4-text, gpt2, opt …).
        encoding: ``"own"`` (the model's own settings, computed here), the name of an encoding or frequency method with
            ``options`` (what the model fixes, its base, layout and rotated width, is filled in), an
            :class:`~milepost.encoding.Encoding`, or a frequency method.
        length: what length-dependent methods read. ``"fixed"``: each row's prompt plus the new tokens of ``generate``
            (or of ``Attachment.expect``), so that token-by-token decoding equals one full pass; ``"growing"``: each
            row's current length, which cannot equal a full pass beyond one layer, because lower layers' states were
            made under earlier frequencies; a number: that length for all rows.
        keep_absolute: keep a learned position embedding (gpt2, opt) beside the new encoding.
        backend: of :func:`milepost.attend`.
        trained_length: where it is not the original length of the model's config.

    Layers without a rotation of their own (NoPE layers) keep none. Where a model has sliding-window and full layers,
    a rotary method replaces the rotation of the full layers and the sliding ones keep theirs.

    Returns:
        An :class:`Attachment`; use it as a context manager, or call :func:`detach`.

    Raises:
        ValueError: a model that cannot be served (latent attention, attention sinks, an own attention code), or one
            that does not rotate as its config says.
    """
    already = attached_to(model)
    if already is not None:
        raise ValueError(f"{already!r} is attached already; call milepost.detach(model) first")
    if not isinstance(length, int) and length not in ("fixed", "growing"):
        raise ValueError(f"length is 'fixed', 'growing' or a number of tokens; got {length!r}")
    rotations = layer_rotations(model)
    config = text_config(model)
    trained = trained_length or trained_length_of(config, rotations)
    with torch.inference_mode(False):  # parameters made inside inference_mode could never be trained
        return Attachment(
            model,
            encodings_for(config, rotations, encoding, options, trained),
            rotations,
            length=length,
            keep_absolute=keep_absolute or encoding == "own",
            backend=backend,
            trained_length=trained,
        )


def detach(model: Any) -> None:
    """Undo :func:`attach`. Does nothing to a model without an attached encoding."""
    attachment = attached_to(model)
    if attachment is not None:
        attachment.detach()


def attached_to(model: nn.Module) -> Attachment | None:
    """What is attached to this model, or to another one around the same decoder (a wrapper, the decoder itself)."""
    if not _ATTACHED:
        return None
    for other, reference in list(_ATTACHED.items()):
        attachment = reference()
        if attachment is not None and (other is model or decoder_of(other) is decoder_of(model)):
            return attachment
    return None


def _unregister(key: str) -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface._global_mapping.pop(key, None)
    AttentionMaskInterface._global_mapping.pop(key, None)


def _check_position_ids(given: Tensor, positions: Positions, first: int | Tensor) -> None:
    """ValueError where these ``(B|1, Q)`` mean something else than tokens counted by the mask, or their places.

    Padding has no position. One shift of a whole row is none, as long as no keys were cached before it.
    """
    if torch.compiler.is_compiling():
        return
    counted, slots = positions.query, torch.arange(positions.num_queries, device=given.device)[None] + first
    absent = torch.zeros_like(counted, dtype=torch.bool)
    if positions.key_present is not None:
        absent = ~positions.key_present[:, positions.query_slots()]
    right = (absent | (given == counted)).all(1) | (absent | (given == slots)).all(1)
    if isinstance(first, int) and first == 0:
        shift = given - counted
        right = right | (absent | (shift == shift.gather(1, (~absent).int().argmax(1, keepdim=True)))).all(1)
    if not bool(right.all()):
        row = int((~right).int().argmax())
        raise ValueError(
            f"row {row} has position_ids {given[min(row, given.shape[0] - 1)].tolist()[:8]} ... where its tokens count "
            f"{counted[min(row, counted.shape[0] - 1)].tolist()[:8]} ...; with padding or a cache an attached encoding "
            "serves no other positions: leave position_ids out, or give whole sequences without padding"
        )


def _key_bound(cache: Any, layer: int, k: Tensor) -> Tensor | None:
    """What no key's norm exceeds, where the caller gave a cache that knows it of these very keys (`DecodingCache`)."""
    layers = getattr(cache, "layers", ())
    held: Any = layers[layer] if layer < len(layers) else None
    return held.key_bound() if hasattr(held, "key_bound") and held.keys is k else None


def _side(mask: Tensor) -> str | None:
    """Where the padding of a ``(B, K)`` mask stands, read on the host."""
    steps = mask[:, 1:].int() - mask[:, :-1].int()
    if not bool((steps < 0).any()):
        return "left"
    if not bool((steps > 0).any()):
        return "right"
    return None


def _silence(module: nn.Embedding) -> Callable[[], None]:
    """Let a learned position table answer zeros; returns a function that restores it."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(original(*args, **kwargs))

    return put(module, "forward", forward)
