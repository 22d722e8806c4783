"""What one process of a distributed test does; see test_distributed.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from milepost.data import load_corpus
from milepost.model import MilepostConfig, MilepostForCausalLM
from milepost.train import TrainConfig, train

ENCODINGS = ("kerple-log", "t5", "fire")


def four_steps(encoding: str, kind: str, rank: int = 0, world: int = 1) -> dict[str, list[float]]:
    """Losses of four steps of SGD, and what became of the encoding's parameters."""
    torch.manual_seed(0)
    config = MilepostConfig(width=32, num_layers=2, num_heads=2, trained_length=64, encoding=encoding)
    model = MilepostForCausalLM(config).train()
    if kind == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.model.encodings.parameters())
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    own = set(model.model.encodings.parameters())
    rest = [parameter for parameter in model.parameters() if parameter not in own]
    optimizer = torch.optim.SGD([{"params": rest, "lr": 0.1}, {"params": list(own), "lr": 1.0}])
    losses = []
    for step in range(4):
        ids = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = wrapped(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    tables = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.model.encodings.parameters()]
    return {"losses": losses, "encoding": [table.detach().double().sum().item() for table in tables]}


def trained(folder: Path, batch_size: int) -> list[float]:
    """Losses of the library's own training loop, checkpoints included."""
    texts = {str(i): "the cat sat on the mat and ran " * 40 * (i + 1) for i in range(3)}
    model = MilepostConfig(width=16, num_layers=1, num_heads=2, encoding="kerple-log")
    how = TrainConfig(steps=6, length=16, batch_size=batch_size, device="cpu", checkpoint_every=3)
    return list(train(model, how, load_corpus(texts, cache=False), folder).losses)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, object] = {
        kind: {encoding: four_steps(encoding, kind, rank, world) for encoding in ENCODINGS} for kind in ("ddp", "fsdp")
    }
    found["train"] = trained(folder / "run", batch_size=4 // world)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main(Path(sys.argv[1]))
