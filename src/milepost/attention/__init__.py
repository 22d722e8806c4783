"""``attend``: turns :class:`~milepost.terms.Terms` into attention, on the fastest backend that does not refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

from torch import Tensor

from milepost.attention import blocked, flex, fused, native, pairs, reference, rows, sdpa
from milepost.attention.tiles import no_autocast
from milepost.positions import Positions
from milepost.terms import Terms

_MODULES: dict[str, ModuleType] = {
    "native": native,
    "triton": fused,
    "flex": flex,
    "sdpa": sdpa,
    "blocked": blocked,
    "pairs": pairs,
    "rows": rows,
    "reference": reference,
}
BACKENDS = tuple(_MODULES)
"""In the order in which ``backend="auto"`` asks them: the fastest first (``milepost bench --groups order``)."""
_READ_KEY_BOUND = (native, sdpa, blocked)
"""The backends that leave out keys by a bound of their norms and take one that is known."""


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why each other one does not.

    Attributes:
        chosen: the backend's name.
        reasons: backend -> ``"chosen"``, or the reason it refused, or that a faster one was taken before it.
    """

    chosen: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        return "\n".join(f"{name:<{width}}  {reason}" for name, reason in self.reasons.items())


def backend(name: str) -> ModuleType:
    """The module of a backend: ``refuses(...)`` and ``run(...)``."""
    if name not in BACKENDS:
        raise ValueError(f"no attention backend is named {name!r}; there are: auto, {', '.join(BACKENDS)}")
    return _MODULES[name]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    backend: str = "auto",
    prepared: bool = False,
    key_bound: Tensor | None = None,
) -> Tensor:
    """Attention as ``terms`` say, at ``positions``.

    ``softmax_j(scale * q'_i . k'_j + b_ij) v'_j`` over the keys that ``positions.allowed`` grants; q', k', v' are what
    the branch and ``value`` make of q, k, v. A query that may see no key gives 0. Autocast is off inside; positions and
    biases are float32 or better whatever the dtype of q.

    Args:
        q: ``(B, H, Q, D)``, any floating dtype.
        k: ``(B, Hkv, K, D)``; H is a multiple of Hkv (grouped queries).
        v: ``(B, Hkv, K, Dv)``.
        positions: unmapped positions of these queries and keys.
        terms: what an encoding returned for them; None = no position signal.
        scale: of the dot product; default ``1/sqrt(D)``.
        dropout: probability of dropping an attention weight (give 0 outside training).
        softcap: ``c * tanh(logits / c)`` before the bias (Gemma 2).
        backend: ``"auto"`` or a name in ``BACKENDS``.
        prepared: k and v come from a cache of keys transformed by ``terms.prepare``.
        key_bound: ``(B or 1, Hkv)``, a number that no ``|k|`` of the given k exceeds, kept by a cache as keys arrive:
            a decoding step then need not read keys that a decaying bias puts out of reach. It is a promise, never
            checked, and changes no result beyond what ``distance_attention`` states. Unused where it would not hold
            (keys that a branch transforms here, or that are rounded to another dtype), and by backends other than
            native, blocked and sdpa, which need none.

    Returns:
        ``(B, H, Q, Dv)`` in the dtype of q.

    Raises:
        ValueError: shapes that do not fit each other or the positions, or a named backend that refuses (the reason is
            in the message).
    """
    terms = Terms() if terms is None else terms
    _check(q, k, v, positions, terms)
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout is the probability of dropping a weight, 0 to 1; got {dropout}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is a positive number, or None for no cap; got {softcap}")
    if key_bound is not None and tuple(key_bound.shape) not in ((1, k.shape[1]), tuple(k.shape[:2])):
        raise ValueError(
            f"key_bound has one number for each key head, (1, {k.shape[1]}) or {tuple(k.shape[:2])}; "
            f"got {tuple(key_bound.shape)}"
        )
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    with no_autocast(q.device):
        given = k
        q, k, v, terms, output = _transform(q, k, v, terms, prepared)
        chosen = _choose(q, k, v, positions, terms, dropout, softcap, backend)
        known = {"key_bound": key_bound} if k is given and chosen in _READ_KEY_BOUND else {}
        out = chosen.run(q, k, v, positions, terms, scale=scale, dropout=dropout, softcap=softcap, **known)
        return out if output is None else output(out).to(out.dtype)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms | None = None,
    *,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Explanation:
    """For each backend: chosen, or the reason it refused. Takes what ``attend`` takes; prints as a table."""
    terms = Terms() if terms is None else terms
    _check(q, k, v, positions, terms)
    q, k, v, terms, _ = _transform(q, k, v, terms, True)
    reasons: dict[str, str] = {}
    chosen = ""
    for name in BACKENDS:
        refusal = _passed_over(backend(name), q, k, v, positions, terms, dropout, softcap)
        if refusal is None and not chosen:
            chosen = name
            reasons[name] = "chosen"
        else:
            reasons[name] = refusal or f"would serve; {chosen} is asked first"
    return Explanation(chosen, reasons)


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    dropout: float,
    softcap: float | None,
    name: str,
) -> ModuleType:
    if name != "auto":
        module = backend(name)
        refusal = module.refuses(q, k, v, positions, terms, dropout=dropout, softcap=softcap)
        if refusal is not None:
            raise ValueError(f"backend {name!r} refuses: {refusal}. Use backend='auto', or see milepost.explain(...)")
        return module
    for candidate in BACKENDS:
        module = backend(candidate)
        if _passed_over(module, q, k, v, positions, terms, dropout, softcap) is None:
            return module
    raise AssertionError("the reference never refuses")


def _passed_over(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    dropout: float,
    softcap: float | None,
) -> str | None:
    """Why ``backend="auto"`` does not take this one: it refuses, or it serves only who asks for it by name."""
    refusal: str | None = module.refuses(q, k, v, positions, terms, dropout=dropout, softcap=softcap)
    if module is flex and q.device.type == "meta":
        return "torch compiles nothing for tensors without numbers"
    if refusal is None and dropout == 0 and hasattr(module, "discouraged"):  # those it yields to refuse dropout
        refusal = module.discouraged(q, k, v, positions, terms)
    return refusal


def _transform(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, prepared: bool
) -> tuple[Tensor, Tensor, Tensor, Terms, Callable[[Tensor], Tensor] | None]:
    """Apply what happens outside the softmax once, so that backends see plain q, k, v (or two branches and more)."""
    if terms.value is not None and not prepared:
        v = terms.value(v, at="keys")
    if len(terms.branches) == 1:
        branch = terms.branches[0]
        if branch.query is not None:
            q = branch.query(q)
        if branch.key is not None and not prepared:
            k = branch.key(k, at="keys")
        whole = branch.near is None and branch.far is None
        kept = () if whole else (replace(branch, query=None, key=None),)
        terms = replace(terms, branches=kept)
    return q, k, v, replace(terms, value=None, output=None), terms.output


def _check(q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q, k and v have shape (batch, heads, length, head_dim); got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not share {k.shape[1]} key and {v.shape[1]} value heads evenly")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"q, k and v are of one batch; got {q.shape[0]}, {k.shape[0]} and {v.shape[0]} rows "
            "(k.expand(batch, -1, -1, -1) shares one row's keys without a copy)"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k have heads of one size; got {q.shape[3]} and {k.shape[3]}")
    if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise ValueError(f"q, k and v are floating point; got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[2] != positions.num_queries or k.shape[2] != positions.num_keys or v.shape[2] != positions.num_keys:
        raise ValueError(
            f"positions are of {positions.num_queries} queries and {positions.num_keys} keys; got q, k, v of length "
            f"{q.shape[2]}, {k.shape[2]}, {v.shape[2]} (layout is (batch, heads, length, head_dim))"
        )
    table = getattr(terms.bias, "table", None)
    if table is not None and table.shape[0] != 1 and table.shape[0] != q.shape[1]:
        raise ValueError(f"the bias of {terms.name} has {table.shape[0]} heads, q has {q.shape[1]}")
