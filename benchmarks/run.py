"""Measure attention against its peers: ``python -m benchmarks.run`` (or ``make bench``).

Each group at each length runs in a process of its own, its contenders in turn within it, round after round, so that a
slow minute of the machine hits all of them. A ratio is the median over rounds of the ratio within a round. Results go
to ``benchmarks/results/<date>-<machine>.json`` and ``.md``, with a plot beside them.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
LENGTHS = {
    "forward": (512, 1024, 2048, 4096, 16384),
    "training": (512, 1024, 2048, 4096),
    "decoding": (4096, 32768),
    "batches": (4096,),
    "rotation": (512, 4096),
    "flex": (1024, 4096),
}
MEMORY = ("sdpa, no bias", "milepost native, kerple-log", "milepost blocked, kerple-log", "sdpa + mask built each call")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default=",".join([*LENGTHS, "memory"]), help="comma-separated (default: all)")
    parser.add_argument("--lengths", help="comma-separated; default: each group's own")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu", help="cpu: process time, for busy machines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    options = arguments().parse_args()
    if options.worker:
        print(json.dumps(worker(json.loads(options.worker))))
        return 0
    rows: list[dict[str, Any]] = []
    for group in options.groups.split(","):
        if group not in (*LENGTHS, "memory"):
            print(f"unknown group {group!r}: choose among {', '.join([*LENGTHS, 'memory'])}", file=sys.stderr)
            return 2
        for job in jobs(group, options):
            print(json.dumps(job), flush=True)
            rows += run_worker(job, options.threads)
    document = {"command": " ".join(["python -m benchmarks.run", *sys.argv[1:]]), **machine(options), "rows": rows}
    name = f"{datetime.date.today()}-{platform.machine()}-{options.threads}t-{options.clock}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(markdown(document))
    plot(document, options.out / f"{name}.png")
    print(f"written: {options.out / name}.md, .json, .png")
    return 0


def jobs(group: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    shared = {"group": group, "clock": options.clock, "rounds": options.rounds, "threads": options.threads}
    if group == "memory":
        return [{**shared, "length": 4096, "dtype": "float32", "only": name} for name in MEMORY]
    lengths = [int(n) for n in options.lengths.split(",")] if options.lengths else LENGTHS[group]
    dtypes = ["float32"] if group in ("flex", "batches") else options.dtypes.split(",")
    found = []
    for dtype in dtypes:
        for length in lengths:
            if dtype == "bfloat16" and length > 4096 and group == "forward":
                continue
            found.append({**shared, "length": length, "dtype": dtype})
    return found


def run_worker(job: dict[str, Any], threads: int) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    line = [sys.executable, "-m", "benchmarks.run", "--worker", json.dumps(job)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return [{**job, "name": "failed", "error": done.stderr.strip().splitlines()[-1:]}]
    return json.loads(done.stdout.splitlines()[-1])


def worker(job: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    from benchmarks import contenders

    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    if job["group"] == "memory":
        return [memory(job, contenders.forward(job["length"], dtype))]
    if job["group"] == "flex":
        racers = contenders.flex(job["length"])
    else:
        racers = contenders.GROUPS[job["group"]](job["length"], dtype)
    clock = time.process_time if job["clock"] == "cpu" else time.perf_counter
    errors = {}
    for racer in racers:
        result = racer.call()  # also the warm-up
        if racer.wanted is not None:
            want = racer.wanted()
            assert isinstance(result, torch.Tensor)
            errors[racer.name] = float((result[:, :, -want.shape[2] :].double() - want).abs().max())
    # Short calls are repeated until a round takes at least twenty milliseconds.
    begin = clock()
    racers[0].call()
    repeats = max(1, min(50, int(0.02 / max(clock() - begin, 1e-5))))
    times: dict[str, list[float]] = {racer.name: [] for racer in racers}
    for _ in range(job["rounds"]):
        for racer in racers:
            begin = clock()
            for _ in range(repeats):
                racer.call()
            times[racer.name].append((clock() - begin) / repeats)
    base = times[racers[0].name]
    rows = []
    for name, mine in times.items():
        ratios = [a / b for a, b in zip(mine, base, strict=True)]
        rows.append(
            {
                **{key: job[key] for key in ("group", "length", "dtype", "clock", "threads", "rounds")},
                "name": name,
                "milliseconds": 1e3 * statistics.median(mine),
                "spread": [1e3 * min(mine), 1e3 * max(mine)],
                "ratio": statistics.median(ratios),
                "ratio_spread": [min(ratios), max(ratios)],
                "error": errors.get(name),
            }
        )
    return rows


def memory(job: dict[str, Any], racers: list[Any]) -> dict[str, Any]:
    """Growth of the process's peak over one call, results included; everything prepared before it counts as given."""
    racer = next(r for r in racers if r.name.startswith(job["only"]))
    racers.clear()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would hide what the call needs
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # forget the peak so far (Linux)
    before = resident()
    racer.call()
    after = peak()
    return {
        **{key: job[key] for key in ("group", "length", "dtype")},
        "name": racer.name,
        "mebibytes": (after - before) / 2**20,
    }


def resident() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return peak()
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmRSS"))


def peak() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def machine(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from milepost import __version__
    from milepost.attention import library

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
        "processor": model,
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "clock": options.clock,
        "threads": options.threads,
        "kernel": library.instruction_set() or library.unavailable(),
        "versions": {
            "milepost": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "shape": "batch 1, 8 heads, head size 64",
    }


def markdown(document: dict[str, Any]) -> str:
    clock = {
        "cpu": f"process CPU time, {document['threads']} thread(s): the machine was shared",
        "wall": f"wall time, {document['threads']} thread(s)",
    }[document["clock"]]
    lines = [
        f"# Attention and rotation, {document['date'][:10]}",
        "",
        f"`{document['command']}`",
        "",
        f"{document['processor']}, {document['cores']} cores, load {document['load']}; kernel: {document['kernel']}; "
        + ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        + f"; {document['shape']}.",
        f"Clock: {clock}. Ratio: to the first row, the median over rounds of the ratio within a round (lowest .. "
        "highest).",
        "Error: largest absolute difference from float64 over the last 32 rows.",
        "",
    ]
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in document["rows"]:
        groups.setdefault((row["group"], row["length"], row["dtype"]), []).append(row)
    for (group, length, dtype), rows in groups.items():
        lines += [f"## {group}, length {length}, {dtype}", ""]
        if group == "memory":
            lines += ["| | MiB over what was there before the call |", "|---|---|"]
            lines += [f"| {row['name']} | {row['mebibytes']:.0f} |" for row in rows]
        else:
            lines += ["| | ms | ratio | | error |", "|---|---|---|---|---|"]
            for row in rows:
                if row["name"] == "failed":
                    lines.append(f"| failed | {row['error']} | | | |")
                    continue
                low, high = row["ratio_spread"]
                error = "" if row["error"] is None else f"{row['error']:.1e}"
                cells = (row["name"], f"{row['milliseconds']:.2f}", f"{row['ratio']:.2f}", f"{low:.2f} .. {high:.2f}")
                lines.append("| " + " | ".join((*cells, error)) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(document: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    for axis, group in zip(axes, ("forward", "training"), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in document["rows"]:
            if row["group"] in (group, "flex" if group == "forward" else group) and row["dtype"] == "float32":
                if row.get("ratio") is not None and row["name"] != "sdpa, no bias":
                    lines.setdefault(row["name"], []).append((row["length"], row["ratio"]))
        for name, points in lines.items():
            points.sort()
            style = "-o" if name.startswith("milepost native") else "--s" if name.startswith("milepost") else ":x"
            axis.plot(*zip(*points, strict=True), style, label=name, markersize=4)
        axis.axhline(1.0, color="black", linewidth=1)
        axis.set(
            xscale="log", yscale="log", xlabel="length", title="forward" if group == "forward" else "forward + backward"
        )
        axis.grid(alpha=0.3)
        if lines:
            axis.legend(fontsize=6)
    axes[0].set_ylabel("time relative to attention without bias (torch SDPA)")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
