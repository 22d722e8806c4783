"""Which encoding each layer of a pretrained model is given, from a name or an object and what the model fixes."""

from __future__ import annotations

from typing import Any

from milepost.encoding import Encoding, build_for, parse_spec
from milepost.encodings.frequencies import FrequencyMethod
from milepost.encodings.rotary import RoPE
from milepost.extend.probe import LayerRotation


def trained_length_of(config: Any, rotations: dict[int, LayerRotation]) -> int | None:
    """The length a checkpoint was trained at: its frequencies' original length, or what the config declares."""
    for rotation in rotations.values():
        trained = getattr(rotation.method, "trained_length", None)
        if trained:
            return int(trained)
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def encodings_for(
    config: Any,
    rotations: dict[int, LayerRotation],
    encoding: str | Encoding | FrequencyMethod,
    options: dict[str, Any],
    trained: int | None,
) -> dict[int, Encoding]:
    """Layer -> encoding; layers that mean the same share one object."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) or []
    mixed = "full_attention" in types and any("sliding" in t for t in types)
    made: dict[Any, Encoding] = {}

    def rope(rotation: LayerRotation, method: FrequencyMethod | None) -> Encoding:
        assert rotation.method is not None
        method = method or rotation.method
        return RoPE(
            head_dim=head_dim,
            base=getattr(method, "base", 10000.0),
            partial=rotation.rotary_dim / head_dim,
            layout=rotation.layout,
            scaling=method,
        )

    def build(rotation: LayerRotation) -> Encoding:
        if isinstance(encoding, Encoding):
            return encoding
        if isinstance(encoding, FrequencyMethod):
            return rope(rotation, encoding)
        name, more = parse_spec(encoding)
        base = getattr(rotation.method, "base", None)
        geometry = {
            "num_heads": config.num_attention_heads,
            "head_dim": head_dim,
            "width": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "vocab_size": config.vocab_size,
            "trained_length": trained,
            "base": base,
            "layout": rotation.layout if rotation.layout != "none" else None,
            "partial": rotation.rotary_dim / head_dim if rotation.rotary_dim else None,
        }
        known = {key: value for key, value in geometry.items() if value is not None}
        return build_for(name, known, **{**more, **options})

    found: dict[int, Encoding] = {}
    rotary_model = any(rotation.layout != "none" for rotation in rotations.values())
    for layer, rotation in rotations.items():
        layer_type = types[layer] if layer < len(types) else None
        if rotary_model and rotation.layout == "none":
            key: Any = "nope"
        elif encoding == "own" or (mixed and layer_type != "full_attention" and not isinstance(encoding, Encoding)):
            key = ("own", rotation)
        else:
            key = ("new", rotation)
        if key not in made:
            if key == "nope":
                made[key] = build_for("nope", {})
            elif key[0] == "own" and rotation.layout == "none":
                made[key] = _unrotated(config)
            else:
                made[key] = rope(rotation, None) if key[0] == "own" else build(rotation)
        found[layer] = made[key].for_layer(layer)
    return found


def _unrotated(config: Any) -> Encoding:
    """What a model without rotation adds in its attention: BLOOM's and MPT's slopes, or nothing."""
    if config.model_type in ("bloom", "mpt"):
        heads = config.num_attention_heads
        return build_for("alibi", {"num_heads": heads}, order="official" if config.model_type == "bloom" else "mpt")
    return build_for("nope", {})
