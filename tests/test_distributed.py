"""Two processes over gloo: DDP, FSDP2 and the training loop do what one process does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed_worker import ENCODINGS, four_steps, trained


@pytest.mark.slow
def test_two_processes_train_as_one_with_learned_tables_and_fire(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in (*sys.path, os.getcwd()) if path),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, "-m", "tests.distributed_worker", str(tmp_path)]
    logs = [(tmp_path / f"log{rank}.txt").open("w+") for rank in range(2)]
    workers = [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT
        )
        for rank, log in enumerate(logs)
    ]
    try:
        one = {encoding: four_steps(encoding, "single") for encoding in ENCODINGS}
        alone = trained(tmp_path / "alone", batch_size=4)
        codes = [worker.wait(timeout=280) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        for log in logs:
            log.close()
    assert codes == [0, 0], (tmp_path / "log0.txt").read_text("utf-8")[-3000:]

    two = json.loads((tmp_path / "found.json").read_text("utf-8"))
    for kind in ("ddp", "fsdp"):
        for encoding in ENCODINGS:
            expected, found = one[encoding], two[kind][encoding]
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5), (kind, encoding)
            assert found["encoding"] == pytest.approx(expected["encoding"], abs=1e-4), (kind, encoding)
    assert len(two["train"]) == 6 and two["train"] == pytest.approx(alone, abs=1e-4)
    assert all(run["losses"][-1] != run["losses"][0] for run in one.values())
