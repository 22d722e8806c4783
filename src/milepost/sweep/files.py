"""Files that are whole or absent: atomic writes, and folders sealed with the checksums of all they hold."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


class Failure(RuntimeError):
    """Something went wrong that the message explains and says how to mend; commands end with exit code 1."""


def canonical_json(value: Any) -> str:
    """The same text for equal values: sorted keys, no NaN (raises ValueError for one)."""
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one, or the whole new one, whatever happens in between.

    Raises `OSError` (a full disk included) with the path in its message; nothing half-written stays behind.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, name = -1, ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        if name:
            Path(name).unlink(missing_ok=True)
        raise explain_os_error(error, path) from error
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def explain_os_error(error: OSError, path: Path) -> OSError:
    """The same error with a message that names the path and the mend."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        mend = "free some space and run the same command again; what is complete stays"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        mend = "choose a folder that can be written with --out"
    else:
        mend = "run the same command again when this is mended"
    return OSError(error.errno, f"{path} cannot be written: {reason}; {mend}")


def seal(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the folder's manifest: `about`, and size and sha256 of every file in it."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    write_atomically(folder / MANIFEST, canonical_json({"about": dict(about), "files": files}))


def damage(folder: Path, about: Mapping[str, Any]) -> str | None:
    """What is wrong with a sealed folder, in words; None when it is whole and about the right thing."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        files, found = manifest["files"], manifest["about"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    if found != dict(about):
        return f"it is about {found}, not {dict(about)}"
    for name, expected in files.items():
        path = folder / name
        try:
            whole = path.stat().st_size == expected["bytes"] and sha256_of(path) == expected["sha256"]
        except OSError:
            return f"{name} is missing"
        if not whole:
            return f"{name} does not match its checksum"
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
