"""Segment embeddings: BERT's input, token + position + segment, normalised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.absolute.common import add, check_input, of_queries
from milepost.encodings.absolute.learned import Beyond, Learned
from milepost.encodings.separators import segments as count_segments
from milepost.positions import Positions


@dataclass(frozen=True, kw_only=True)
class SegmentsConfig(EncodingConfig):
    """Options of :class:`Segments`.

    Attributes:
        width: of the embeddings.
        trained_length: rows of the position table; ``beyond``: what happens after them (see :class:`Learned`).
        num_segments: rows of the segment table.
        separators: token ids that close a segment ([SEP]); read where no segment ids are handed over. The last segment
            takes all that follow.
        position: add a learned position too. norm: finish with a layer norm. eps: of that norm.
        std: standard deviation of the initial tables.
    """

    width: int
    trained_length: int
    beyond: Beyond = "raise"
    num_segments: int = 2
    separators: tuple[int, ...] = ()
    position: bool = True
    norm: bool = True
    eps: float = 1e-12
    std: float = 0.02

    def __post_init__(self) -> None:
        if self.num_segments < 1:
            raise ValueError(f"num_segments is at least 1; got {self.num_segments}")


@register(
    "segments",
    title="Segment embeddings",
    family="absolute",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="initial",
    source="Devlin et al. 2018 (arXiv 1810.04805), section 3.2 and figure 2",
    summary="BERT's input: token, position and segment embeddings added, then a layer norm.",
)
class Segments(Encoding):
    """Segment embeddings: ``LayerNorm(x_t + E[t] + S[segment(t)])``.

    Segment ids are ``segments`` of :meth:`embed` or ``positions.query_segment`` (a model's ``token_type_ids``); without
    both, the number of separators before the token (a separator belongs to the segment it closes); without separators,
    segment 0, as BERT does.

    Parameters: ``table`` ``(num_segments, width)`` and ``position.table`` ``(trained_length, width)``, N(0, 0.02);
    ``norm`` with weight 1, bias 0, eps 1e-12. Dropout, which BERT puts after it, is the model's.
    Shapes: ``(B, Q, width)`` in and out, in the dtype of the input.
    Raises ValueError for a segment id the table does not have, and as :class:`Learned` does.
    Source: Devlin et al. 2018 (arXiv 1810.04805); equal to the BertEmbeddings of transformers.
    """

    Config = SegmentsConfig
    config: SegmentsConfig
    needs_segments = True

    def setup(self) -> None:
        options = self.config
        self.needs_tokens = bool(options.separators)  # type: ignore[misc]  # per instance
        self.table = nn.Parameter(torch.empty(options.num_segments, options.width))
        self.position = (
            Learned(width=options.width, trained_length=options.trained_length, beyond=options.beyond, std=options.std)
            if options.position
            else None
        )
        self.norm = nn.LayerNorm(options.width, eps=options.eps) if options.norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.config.std)
        if self.position is not None:
            self.position.reset_parameters()
        if self.norm is not None:
            self.norm.reset_parameters()

    def segment_ids(self, positions: Positions, tokens: Tensor | None, segments: Tensor | None) -> Tensor:
        """``(B|1, Q)`` int64: the segment of every query."""
        segments = positions.query_segment if segments is None else segments
        last = self.config.num_segments - 1
        if segments is None and self.config.separators:
            before, _ = count_segments(tokens, positions, self.config.separators)
            return of_queries(before, positions).clamp(max=last)
        if segments is None:
            return torch.zeros_like(positions.query, dtype=torch.int64)
        if segments.shape[-1] != positions.num_queries:
            raise ValueError(f"segment ids are those of the {positions.num_queries} queries; got {segments.shape[-1]}")
        if not torch.compiler.is_compiling() and segments.numel():
            low, high = int(segments.min()), int(segments.max())
            if low < 0 or high > last:
                raise ValueError(
                    f"segment id {high if high > last else low} is outside the table of {last + 1}; raise num_segments"
                )
        return segments

    def embed(
        self, x: Tensor, positions: Positions, tokens: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        check_input(x, positions, self.config.width, self.name)
        code = self.table[self.segment_ids(positions, tokens, segments)]
        if self.position is not None:
            code = code + self.position.code(positions)
        if self.norm is None:
            return add(x, code)
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(add(x.to(code.dtype), code)).to(x.dtype)
