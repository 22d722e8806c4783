"""The matrix products of attention alone, by torch: what is left when everything else costs nothing.

torch's rate, not the processor's: where torch's library does not use the widest instructions (as MKL on processors of
another maker), a kernel of one's own can be faster than this floor.
"""

from __future__ import annotations

import time

import torch

from milepost.bench.case import Case
from milepost.bench.race import Racer

ROWS = 256
"""Queries of a product: the shapes are (256 x D) (D x L) and (256 x L) (L x D)."""
SQUARE = 1024


def racer(case: Case) -> Racer:
    """Each head's products, block by block over the keys up to the block's end; seven instead of two in training.

    Backward has five more: q k again, dout v, and those of dq, dk and dv. Blocks reach into the future: the time
    that counts is the share that causal attention needs.
    """
    q, k, v = (x.detach()[0] for x in (case.q, case.k, case.v))
    kt, vt = k.mT.contiguous(), v.mT.contiguous()
    logits = torch.empty(ROWS * case.length, dtype=case.dtype)

    def products() -> None:
        for head in range(q.shape[0]):
            for start in range(0, case.length, ROWS):
                stop = min(start + ROWS, case.length)
                block = q[head, start:stop]
                s = logits[: (stop - start) * stop].view(stop - start, stop)
                torch.mm(block, kt[head, :, :stop], out=s)
                torch.mm(s, v[head, :stop])
                if case.training:
                    torch.mm(block, kt[head, :, :stop], out=s)
                    torch.mm(block, vt[head, :, :stop], out=s)
                    torch.mm(s, k[head, :stop])
                    torch.mm(s.mT, block)
                    torch.mm(s.mT, block)

    heads, length, size = q.shape
    done = sum((min(start + ROWS, length) - start) * min(start + ROWS, length) for start in range(0, length, ROWS))
    needed = length * (length + 1) // 2
    work = 2.0 * size * heads * done * (7 if case.training else 2)
    note = f"a square product of size {SQUARE}: {square_rate(case.dtype):.0f} GFLOP/s"
    name = "matrix products alone (torch.mm)"
    return Racer(name, products, floor=True, share=needed / done, work=work, note=note)


def square_rate(dtype: torch.dtype) -> float:
    """GFLOP/s of torch's product of two large square matrices, the best of five: what its library reaches at most."""
    a, b = torch.randn(2, SQUARE, SQUARE).to(dtype)
    out = torch.empty_like(a)
    # Of one thread, the time that it computed: what others do on the machine does not count
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for _ in range(6):
        begin = clock()
        torch.mm(a, b, out=out)
        seconds.append(clock() - begin)
    return 2e-9 * SQUARE**3 / min(seconds[1:])
