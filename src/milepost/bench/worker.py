"""The worker process of a benchmark: `python -m milepost.bench.worker WORK_FOLDER PARENT_PID`."""

from __future__ import annotations

import sys

from milepost.bench.measure import perform
from milepost.sweep import worker_main

if __name__ == "__main__":
    sys.exit(worker_main(perform))
