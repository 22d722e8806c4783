"""FLOATER: position codes along the path of a learned dynamical system."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.absolute.common import add, check_input
from milepost.positions import Positions
from milepost.terms import Branch, Terms

# ---- the path -------------------------------------------------------------------------------------------------------


class _Field:
    """h at the times of a fixed grid; the time column of both layers is added up beforehand."""

    def __init__(self, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, step: float, first: int, steps: int) -> None:
        index = torch.arange(first, first + steps, dtype=torch.float64, device=w1.device)[:, None]
        thirds = torch.arange(4, dtype=torch.float64, device=w1.device) / 3
        self.times = (step * (index + thirds)).to(w1.dtype)
        self.w1, self.w2 = w1[:, :-1].contiguous(), w2[:, :-1].contiguous()
        self.w1t, self.w2t = self.w1.t(), self.w2.t()
        self.add1 = (b1 + self.times.view(-1, 1) * w1[:, -1]).unbind(0)
        self.add2 = (b2 + self.times.view(-1, 1) * w2[:, -1]).unbind(0)

    def __call__(self, y: Tensor, time: int) -> tuple[Tensor, Tensor]:
        """h at state ``(S, D)`` and time ``4 * step + third``, and the hidden layer after its ReLU."""
        hidden = torch.addmm(self.add1[time], y, self.w1t).relu_()
        return torch.addmm(self.add2[time], hidden, self.w2t), hidden

    def stages(self, y: Tensor, h: float, step: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """One step of the 3/8 rule: the states its slopes were taken at, their hidden layers, and the next state."""
        k1, a1 = self(y, 4 * step)
        y2 = torch.add(y, k1, alpha=h / 3)
        k2, a2 = self(y2, 4 * step + 1)
        y3 = torch.add(y, k2, alpha=h).add_(k1, alpha=-h / 3)
        k3, a3 = self(y3, 4 * step + 2)
        y4 = torch.add(y, k1, alpha=h).add_(k2, alpha=-h).add_(k3, alpha=h)
        k4, a4 = self(y4, 4 * step + 3)
        k2.add_(k3)
        after = torch.add(y, k1, alpha=h / 8).add_(k2, alpha=3 * h / 8).add_(k4, alpha=h / 8)
        return [y, y2, y3, y4], [a1, a2, a3, a4], after


def integrate(
    start: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, delta: float, substeps: int, first: int, count: int
) -> Tensor:
    """States ``(count, S, D)`` at positions ``first .. first + count - 1``, from ``start`` ``(S, D)`` at ``first``.

    Runge-Kutta of order four by the 3/8 rule, ``substeps`` fixed steps for one position, ``delta`` in time apart.
    """
    h = delta / substeps
    field = _Field(w1, b1, w2, b2, h, first * substeps, max(count - 1, 0) * substeps)
    y, states = start, [start]
    for step in range((count - 1) * substeps):
        _, _, y = field.stages(y, h, step)
        if (step + 1) % substeps == 0:
            states.append(y)
    return torch.stack(states)


@torch.library.custom_op("milepost::floater", mutates_args=())
def floater(
    at: Tensor, start: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, delta: float, substeps: int
) -> Tensor:
    """States ``(S, *at.shape, D)`` at the int64 positions ``at``, from ``start`` ``(S, D)`` at position 0."""
    count = int(at.max()) + 1 if at.numel() else 1
    path = integrate(start, w1, b1, w2, b2, delta, substeps, 0, count)
    return path[at].movedim(-2, 0).contiguous()


@floater.register_fake
def _(at: Tensor, start: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, delta: float, substeps: int) -> Tensor:
    return start.new_empty((start.shape[0], *at.shape, start.shape[1]))


@torch.library.custom_op("milepost::floater_backward", mutates_args=())
def floater_backward(
    grad: Tensor, at: Tensor, start: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, delta: float, substeps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of start, w1, b1, w2, b2: the exact derivative of the steps taken, last step first."""
    count, h = (int(at.max()) + 1 if at.numel() else 1), delta / substeps
    size, width = start.shape
    arriving = torch.zeros(count, size, width, dtype=grad.dtype, device=grad.device)
    arriving.index_add_(0, at.flatten(), grad.movedim(0, -2).reshape(-1, size, width))
    field = _Field(w1, b1, w2, b2, h, 0, (count - 1) * substeps)
    states, y = [], start
    for step in range((count - 1) * substeps):
        states.append(y)
        _, _, y = field.stages(y, h, step)
    outer: dict[str, list[Tensor]] = {"slope": [], "hidden": [], "before": [], "state": [], "time": []}

    def pull(slope: Tensor, state: Tensor, hidden: Tensor, time: Tensor) -> Tensor:
        before = torch.mm(slope, field.w2).mul_(hidden > 0)
        for name, value in zip(outer, (slope, hidden, before, state, time), strict=True):
            outer[name].append(value)
        return torch.mm(before, field.w1)

    times = field.times.view(-1, 1).expand(-1, size).unbind(0)
    g = arriving[count - 1]
    for step in reversed(range((count - 1) * substeps)):
        (y1, y2, y3, y4), (a1, a2, a3, a4), _ = field.stages(states[step], h, step)
        t1, t2, t3, t4 = times[4 * step : 4 * step + 4]
        g4 = pull(g * (h / 8), y4, a4, t4)
        g3 = pull((g * (3 * h / 8)).add_(g4, alpha=h), y3, a3, t3)
        g2 = pull((g * (3 * h / 8)).add_(g4, alpha=-h).add_(g3, alpha=h), y2, a2, t2)
        g1 = pull((g * (h / 8)).add_(g4, alpha=h).add_(g3, alpha=-h / 3).add_(g2, alpha=h / 3), y1, a1, t1)
        g = (g + g1).add_(g2).add_(g3).add_(g4)
        if step % substeps == 0:
            g = g + arriving[step // substeps]
    if not outer["slope"]:
        return g, torch.zeros_like(w1), torch.zeros_like(b1), torch.zeros_like(w2), torch.zeros_like(b2)
    slope, hidden, before, state, time = (torch.cat(parts) for parts in outer.values())
    grad_w1 = before.t() @ torch.cat([state, time[:, None]], dim=1)
    grad_w2 = slope.t() @ torch.cat([hidden, time[:, None]], dim=1)
    return g.clone(), grad_w1, before.sum(0), grad_w2, slope.sum(0)


@floater_backward.register_fake
def _(
    grad: Tensor, at: Tensor, start: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, delta: float, substeps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (start, w1, b1, w2, b2))  # type: ignore[return-value]  # five of them


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.delta, ctx.substeps = inputs
    ctx.save_for_backward(*tensors)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    found = floater_backward(grad.contiguous(), *saved, ctx.delta, ctx.substeps)
    return (None, *found, None, None)


floater.register_autograd(_derivative, setup_context=_keep)


# ---- the encoding ---------------------------------------------------------------------------------------------------


class Dynamics(nn.Module):
    """``h(t, p) = W2 [relu(W1 [p; t] + b1); t] + b2``: the speed of the position code, time as last input of both."""

    def __init__(self, width: int, warm_start: bool) -> None:
        super().__init__()
        self.warm_start = warm_start
        self.w1 = nn.Parameter(torch.empty(width, width + 1))
        self.b1 = nn.Parameter(torch.empty(width))
        self.w2 = nn.Parameter(torch.empty(width, width + 1))
        self.b2 = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier normal weights and zero biases; a warm start has a zero second layer, so that h = 0."""
        nn.init.xavier_normal_(self.w1)
        nn.init.zeros_(self.b1)
        nn.init.zeros_(self.b2)
        if self.warm_start:
            nn.init.zeros_(self.w2)
        else:
            nn.init.xavier_normal_(self.w2)

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w1, self.b1, self.w2, self.b2


@dataclass(frozen=True, kw_only=True)
class FLOATERConfig(EncodingConfig):
    """Options of :class:`FLOATER`.

    Attributes:
        width: of the embeddings.
        layers: ``input`` adds the code to the embeddings (the survey's reading); ``every`` adds codes to the projected
            queries, keys and values of each layer, as the published code does.
        num_layers, num_heads, head_dim: of the model, for ``every``.
        delta: time between two positions.
        substeps: Runge-Kutta steps for one position.
        warm_start: begin at codes of 0, which change nothing, to continue from a trained model.
    """

    width: int
    layers: Literal["input", "every"] = "input"
    num_layers: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    delta: float = 0.01
    substeps: int = 5
    warm_start: bool = False

    def __post_init__(self) -> None:
        if self.layers not in ("input", "every"):
            raise ValueError(f"layers is 'input' or 'every'; got {self.layers!r}")
        if self.delta <= 0 or self.substeps < 1:
            raise ValueError(
                f"delta is positive and substeps at least 1; got delta {self.delta}, substeps {self.substeps}"
            )
        if self.layers == "every":
            for name in ("num_layers", "num_heads", "head_dim"):
                if getattr(self, name) is None:
                    raise ValueError(f"layers='every' needs {name}")


class _Path(Encoding):
    """What FLOATER at the input and in a layer share: start states, the dynamics, and the path made of them."""

    Config = FLOATERConfig
    config: FLOATERConfig

    def begin(self, states: int, layers: int, dynamics: Dynamics, owns: bool) -> None:
        """``states`` start states; the dynamics is registered by its owner only, so that it is one parameter set."""
        width = self.config.width if self.config.layers == "input" else self._inner_width()
        self.bound = math.sqrt(6 / ((layers + states) * width))
        self.start = nn.Parameter(torch.empty(states, width))
        self._dynamics = (dynamics,)
        if owns:
            self.dynamics = dynamics
        self._known: tuple[tuple[Tensor, ...], Tensor] | None = None
        self.reset_parameters()

    def _inner_width(self) -> int:
        assert self.config.num_heads is not None and self.config.head_dim is not None
        return self.config.num_heads * self.config.head_dim

    def reset_parameters(self) -> None:
        if self.config.warm_start:
            nn.init.zeros_(self.start)
        else:
            nn.init.uniform_(self.start, -self.bound, self.bound)

    def states(self, at: Tensor) -> Tensor:
        """``(S, B|1, n, width)``: the codes at integer positions ``(B|1, n)``."""
        if at.is_floating_point():
            raise ValueError("FLOATER's path is integrated from position to position: give it integer positions")
        at = at.clamp(min=0)
        w1, b1, w2, b2 = (w.to(self.start.dtype) for w in self._dynamics[0].weights())
        delta, substeps = self.config.delta, self.config.substeps
        with torch.autocast(at.device.type, enabled=False):
            if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not at.numel():
                return floater(at, self.start, w1, b1, w2, b2, delta, substeps)
            return self._grown(int(at.max()) + 1, (self.start, w1, b1, w2, b2))[at].movedim(-2, 0)

    def _grown(self, count: int, weights: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """``(>= count, S, width)``: the path so far, kept in evaluation and continued; weights that change end it."""
        start, w1, b1, w2, b2 = weights
        path, same = start.detach()[None], False
        if self._known is not None and self._known[0][0].dtype == start.dtype:
            same = all(a.device == b.device and torch.equal(a, b) for a, b in zip(weights, self._known[0], strict=True))
        if same and self._known is not None:
            path = self._known[1]
        if path.shape[0] < count:
            have, delta, substeps = path.shape[0], self.config.delta, self.config.substeps
            more = integrate(path[-1], w1, b1, w2, b2, delta, substeps, have - 1, count - have + 1)
            path = torch.cat([path, more[1:]])
        if not same or self._known is None or path is not self._known[1]:
            self._known = (tuple(w.detach().clone() for w in weights), path)
        return path

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}


class FLOATERLayer(_Path):
    """FLOATER in one layer: codes added to its projected queries, keys and values. Made by :class:`FLOATER`.

    Shapes: one :class:`~milepost.terms.Branch` and ``value``. Where keys and values have fewer heads than queries, they
    take the first heads of their codes.
    """

    def __init__(self, config: FLOATERConfig, dynamics: Dynamics, owns: bool) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.begin(3, config.num_layers or 1, dynamics, owns)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        heads = (self.config.num_heads, self.config.head_dim)
        both = self.states(torch.cat([positions.query, positions.key], dim=1)).unflatten(-1, heads).transpose(2, 3)
        at_queries, at_keys = both.split([positions.num_queries, positions.num_keys], dim=3)

        def query(q: Tensor) -> Tensor:
            return add(q, at_queries[0])

        def key(k: Tensor, at: str) -> Tensor:
            return add(k, (at_keys if at == "keys" else at_queries)[1][:, : k.shape[1]])

        def value(v: Tensor, at: str) -> Tensor:
            return add(v, (at_keys if at == "keys" else at_queries)[2][:, : v.shape[1]])

        return Terms(branches=(Branch(query=query, key=key),), value=value)


_LIU = "Liu et al. 2020 (arXiv 2003.09229)"


@register(
    "floater-layers",
    title="FLOATER in every layer",
    family="absolute",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="every",
    source=_LIU,
    summary="Codes along a learned path, added to the queries, keys and values of every layer.",
    preset={"layers": "every"},
    shared=False,
)
@register(
    "floater",
    title="FLOATER",
    family="absolute",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="initial",
    source=_LIU,
    summary="Position codes along the path of a learned differential equation, added to the token embeddings.",
    survey="FLOATER",
)
class FLOATER(_Path):
    """FLOATER: ``x_t + p(t)`` with ``dp/ds = h(s, p)``, ``p(t) = p(0) + integral of h from 0 to t * delta``.

    ``h(s, p) = W2 [relu(W1 [p; s] + b1); s] + b2``, integrated by Runge-Kutta of order four (3/8 rule) in ``substeps``
    fixed steps a position. Any position can be reached by going on, at a cost linear in it; evaluation keeps the path
    it has and continues it.

    Parameters: ``start`` (one state at the input; three for each layer with ``layers="every"``), Xavier uniform over
    the states of all layers; ``dynamics`` W1, W2 ``(D, D + 1)``, Xavier normal, b1, b2 zero: one h for all states and
    layers. ``warm_start=True`` begins with codes of 0 in every place, so that a trained model (sinusoidal, in the
    paper) goes on exactly as it was.
    Shapes: ``(B, Q, width)`` in and out; for ``every`` see :class:`FLOATERLayer`, one for each layer by ``for_layer``.
    Raises ValueError for positions that are no integers; TypeError for the terms of all layers at once.
    Source: Liu et al. 2020 (arXiv 2003.09229). The published code adds to q, k and v in every layer, takes delta 0.01
    (the paper, as far as known, 0.1), refreshes the path every 400 updates only, and stops at 255 positions; here the
    path is fresh in every training pass, and its gradient is that of the steps taken, not of the adjoint equation.
    """

    def setup(self) -> None:
        options = self.config
        if options.layers == "input":
            self.begin(1, 1, Dynamics(options.width, options.warm_start), True)
            return
        dynamics = Dynamics(self._inner_width(), options.warm_start)
        assert options.num_layers is not None
        self.layers = nn.ModuleList(FLOATERLayer(options, dynamics, n == 0) for n in range(options.num_layers))

    def reset_parameters(self) -> None:
        if self.config.layers == "input":
            super().reset_parameters()

    def for_layer(self, layer: int) -> Encoding:
        if self.config.layers == "input":
            return self
        return self.layers[layer % len(self.layers)]  # type: ignore[return-value]  # ModuleList hides the class

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        if self.config.layers == "every":
            raise TypeError("FLOATER in every layer has one state a layer: call encoding.for_layer(layer)(positions)")
        return Terms()

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        if self.config.layers == "every":
            return x
        check_input(x, positions, self.config.width, self.name)
        return add(x, self.states(positions.query)[0])
