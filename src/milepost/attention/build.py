"""Compile the attention kernel: ``python -m milepost.attention.build``, or ``build(directory)`` from a package build.

Needs nothing but the standard library and a C++ compiler (``$CXX``, g++, c++ or clang++).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().with_name("kernel.cpp")
LIBRARY = "_kernel.so"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
X86 = {
    "avx512": ["-DMILEPOST_WIDTH=16", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma"],
    "avx2": ["-DMILEPOST_WIDTH=8", "-mavx2", "-mfma"],
    "portable": ["-DMILEPOST_WIDTH=4"],
}
OTHER = {"portable": ["-DMILEPOST_WIDTH=4"]}


class BuildError(RuntimeError):
    """No compiler, or one that failed; the message holds what it said."""


def compiler() -> list[str] | None:
    """The command of the first C++ compiler there is, or None."""
    for candidate in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return None


def source_hash() -> str:
    """SHA-256 of `kernel.cpp`: a library carries that of the source it was compiled from."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def build(target: Path | str, *, extra: list[str] | None = None, command: list[str] | None = None) -> Path | None:
    """Compile `kernel.cpp` into ``target/_kernel.so`` and return its path; None where there is no compiler.

    Each instruction set becomes one object; which one runs is decided when the library is used. `extra` are more
    flags for the compiler, `command` names another compiler. Raises BuildError if the compiler fails.
    """
    command = command or compiler()
    if command is None:
        return None
    flags = [*FLAGS, *(extra or [])]
    machine = _run([*command, "-dumpmachine"]).split("-")[0]
    sets = X86 if machine in ("x86_64", "amd64") else OTHER
    path = Path(target) / LIBRARY
    with tempfile.TemporaryDirectory() as place:
        jobs: dict[str, list[str]] = {name: [f"-DMILEPOST_ISA={name}", *more] for name, more in sets.items()}
        jobs["interface"] = [f'-DMILEPOST_SOURCE="{source_hash()}"']
        objects = []
        running = []
        for name, more in jobs.items():
            objects.append(str(Path(place) / f"{name}.o"))
            line = [*command, *flags, *more, "-c", str(SOURCE), "-o", objects[-1]]
            running.append((line, subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
        for line, process in running:
            said, _ = process.communicate()
            if process.returncode:
                raise BuildError(f"{shlex.join(line)} failed:\n{said}")
        # Written beside its place and moved: a process that has the old library open keeps it.
        made = Path(place) / LIBRARY
        _run([*command, *flags, "-shared", "-pthread", *objects, "-o", str(made)])
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{LIBRARY}.{os.getpid()}")
        shutil.copy2(made, beside)
        os.replace(beside, path)
    return path


def _run(line: list[str]) -> str:
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(line)} failed:\n{done.stdout}")
    return done.stdout


def main() -> int:
    if compiler() is None:
        print("no C++ compiler found: install g++ or clang++, or name one in CXX", file=sys.stderr)
        return 1
    print(build(SOURCE.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
