"""Where a sweep stands and how long it will take: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from milepost.sweep.jobs import Job


class Progress:
    """Shows jobs as they start, advance and end. A context manager; `console` decides between display and lines.

    describe: result -> a few words about a finished run, for its line.
    """

    PLAIN_INTERVAL = 15.0

    def __init__(
        self,
        total: int,
        *,
        workers: int = 1,
        console: Console | None = None,
        describe: Callable[[Mapping[str, Any]], str] | None = None,
        quiet: bool = False,
    ) -> None:
        self.total = total
        self.workers = max(workers, 1)
        self.describe = describe
        self.quiet = quiet
        self._console = console
        self._bars: Any = None
        self._overall: Any = None
        self._tasks: dict[str, Any] = {}
        self._fractions: dict[str, float] = {}
        self._begun = time.monotonic()
        self._done_before = 0.0
        self._ended = 0
        self._last_plain = self._begun

    def __enter__(self) -> Progress:
        from rich.console import Console

        self._console = self._console or Console(stderr=True, highlight=False)
        self._begun = self._last_plain = time.monotonic()
        if self._console.is_terminal and not self.quiet:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[phase]}", markup=False),
                TimeElapsedColumn(),
            )
            self._bars = Bars(*columns, console=self._console, transient=True)
            self._bars.start()
            self._overall = self._bars.add_task(f"all {self.total} runs", total=1.0, phase="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    # ---- what happens ----

    def note(self, text: str) -> None:
        """One line that stays."""
        if self.quiet or self._console is None:
            return
        self._console.print(text, markup=False, soft_wrap=True)

    def already(self, job: Job) -> None:
        self._done_before += 1.0
        self._ended += 1
        self.note(f"{job.label}: complete, kept")
        self.tick()

    def started(self, job: Job) -> None:
        self._fractions[job.name] = 0.0
        if self._bars is not None:
            self._tasks[job.name] = self._bars.add_task(job.label, total=1.0, phase="starting")
        else:
            self.note(f"{job.label}: started")

    def advanced(self, job: Job, message: Mapping[str, Any]) -> None:
        fraction = min(max(float(message.get("fraction", 0.0)), 0.0), 1.0)
        if not self._fractions.get(job.name):
            # What a worker had from an earlier attempt is no measure of speed
            self._done_before += fraction if fraction > 0.05 else 0.0
        self._fractions[job.name] = fraction
        if self._bars is not None:
            numbers = ", ".join(f"{k} {v:.3g}" for k, v in message.items() if k not in ("fraction", "phase"))
            phase = str(message.get("phase", ""))
            text = f"{phase}, {numbers}" if numbers else phase
            self._bars.update(self._tasks[job.name], completed=fraction, phase=text)
        self.tick()

    def finished(self, job: Job, result: Mapping[str, Any], seconds: float) -> None:
        words = f" · {self.describe(result)}" if self.describe is not None else ""
        self._end(job, f"{job.label}: done in {duration(seconds)}{words}")

    def failed(self, job: Job, message: str) -> None:
        self._end(job, f"{job.label}: FAILED: {message}")

    def tick(self) -> None:
        """Bring the overall line up to date."""
        left = self.seconds_left()
        text = f"{duration(left)} left" if left is not None else "estimating time"
        if self._bars is not None:
            self._bars.update(self._overall, completed=self._fraction(), phase=text)
        elif time.monotonic() - self._last_plain >= self.PLAIN_INTERVAL:
            self._last_plain = time.monotonic()
            self.note(f"{self._ended} of {self.total} runs ended, {100 * self._fraction():.0f} % done, {text}")

    def seconds_left(self) -> float | None:
        """Expected seconds to the end, from what this process has seen done; None until that means something."""
        elapsed = time.monotonic() - self._begun
        done_here = self._fraction() * self.total - self._done_before
        if elapsed < 3.0 or done_here < 0.03:
            return None
        return elapsed * max(self.total * (1.0 - self._fraction()), 0.0) / done_here

    def _fraction(self) -> float:
        return min((self._ended + sum(self._fractions.values())) / max(self.total, 1), 1.0)

    def _end(self, job: Job, line: str) -> None:
        self._fractions.pop(job.name, None)
        self._ended += 1
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(job.name))
        self.note(line)
        self.tick()


def duration(seconds: float) -> str:
    """'42 s', '3 min 5 s', '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
