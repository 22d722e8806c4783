"""The state of a sweep, which is its directory and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from milepost.sweep.files import Failure, canonical_json, damage, explain_os_error, write_atomically

RESULT = "result.json"


class DifferentSettings(Failure, ValueError):
    """The directory holds a sweep with other settings. `differences`: name -> (there, asked for)."""

    def __init__(self, path: Path, differences: Mapping[str, tuple[Any, Any]]) -> None:
        self.differences = dict(differences)
        lines = "\n".join(f"  {name}: {a!r} there, {b!r} asked for" for name, (a, b) in differences.items())
        super().__init__(
            f"{path} holds a sweep with other settings; give those, or another folder with --out:\n{lines}"
        )


class SweepBusy(Failure):
    """Another process works in this directory."""


class SweepDirectory:
    """A sweep's directory.

    settings.json            what the sweep is; written first, never changed
    runs/NAME/               a complete run: result.json, its files, manifest.json with all checksums
    work/NAME/               a run in progress: checkpoints, out/ (becomes runs/NAME by one rename), log.txt
    lock                     held (flock) by the process that works here
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory alone.

        Raises `SweepBusy` when another process holds it, and `OSError` when it cannot be made or written.
        """
        lock = self.path / "lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise explain_os_error(error, self.path) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise SweepBusy(
                    f"process {owner} is working in {self.path}: wait until it ends, or give another folder with --out"
                ) from None
            try:
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)
            except OSError as error:
                raise explain_os_error(error, lock) from error
            yield
        finally:
            os.close(handle)

    def claim(self, settings: Mapping[str, Any]) -> bool:
        """Make this directory the sweep of these settings; True when it already was.

        Raises `DifferentSettings` when it is another sweep's, and `Failure` for a folder that holds something else.
        """
        path = self.path / "settings.json"
        wanted = json.loads(canonical_json(settings))
        if path.exists():
            there = _read_json(path)
            if not isinstance(there, dict):
                raise Failure(f"{path} is damaged: delete the folder, or choose another one with --out")
            if there != wanted:
                raise DifferentSettings(self.path, differences(there, wanted))
            return True
        strangers = sorted(p.name for p in self.path.iterdir() if p.name != "lock" and not p.name.startswith("."))
        if strangers:
            raise Failure(
                f"{self.path} is not empty and holds no sweep (it has {', '.join(strangers[:3])}): choose another "
                f"folder with --out"
            )
        write_atomically(path, canonical_json(wanted))
        return False

    def run_folder(self, name: str) -> Path:
        return self.path / "runs" / name

    def work_folder(self, name: str) -> Path:
        return self.path / "work" / name

    def discard_damaged(self, name: str, about: Mapping[str, Any]) -> str | None:
        """Remove a run that is not whole, and say what was wrong with it; None when it is whole or absent."""
        folder = self.run_folder(name)
        if not folder.exists():
            return None
        problem = damage(folder, about)
        if problem is None and not isinstance(_read_json(folder / RESULT), dict):
            problem = f"{RESULT} is not a JSON object"
        if problem is not None:
            shutil.rmtree(folder)
        return problem

    def is_complete(self, name: str) -> bool:
        """After `discard_damaged`: whether the run is there."""
        return self.run_folder(name).is_dir()

    def result(self, name: str) -> dict[str, Any]:
        """The run's result.json."""
        value: dict[str, Any] = json.loads((self.run_folder(name) / RESULT).read_text("utf-8"))
        return value


def differences(there: Any, asked: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted names of all values that differ, as (there, asked for); a missing one is given as '(none)'."""
    if isinstance(there, dict) and isinstance(asked, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted({*there, *asked}):
            name = f"{prefix}.{key}" if prefix else str(key)
            found |= differences(there.get(key, "(none)"), asked.get(key, "(none)"), name)
        return found
    return {} if there == asked else {prefix: (there, asked)}


def file_name(text: str) -> str:
    """A name for a folder from any text: letters, digits, '.', '=', '+', '-' and '_' stay, the rest becomes '_'."""
    return re.sub(r"[^A-Za-z0-9.=+_-]+", "_", text).strip("._") or "run"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
