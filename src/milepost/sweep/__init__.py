"""A directory as the state of a long sweep: runs in subprocesses, resumable after a kill, nothing counted twice.

    directory = SweepDirectory("sweep")
    with directory.lock():
        directory.claim(settings)                        # refuses a directory that holds other settings
        failures = run_jobs(directory, jobs, workers=2, worker="package.module", progress=progress)
        results = [directory.result(job.name) for job in jobs]

`SweepDirectory` knows what is complete and what is damaged, `run_jobs` starts worker processes for what is missing,
`worker_main` is what such a process calls, `Progress` shows where everything stands. What a run computes is the
caller's: `compare` trains and measures models, `stretch` measures methods.
"""

from __future__ import annotations

from milepost.sweep.directory import DifferentSettings, SweepBusy, SweepDirectory
from milepost.sweep.files import Failure, canonical_json, write_atomically
from milepost.sweep.jobs import Job, run_jobs
from milepost.sweep.progress import Progress
from milepost.sweep.worker import Reporter, worker_main

__all__ = [
    "DifferentSettings",
    "Failure",
    "Job",
    "Progress",
    "Reporter",
    "SweepBusy",
    "SweepDirectory",
    "canonical_json",
    "run_jobs",
    "worker_main",
    "write_atomically",
]
