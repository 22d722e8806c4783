"""The worker process of a stretch: `python -m milepost.stretch.worker WORK_FOLDER PARENT_PID`."""

from __future__ import annotations

import sys

from milepost.stretch.run import perform
from milepost.sweep import worker_main

if __name__ == "__main__":
    sys.exit(worker_main(perform))
