"""Virtual environments with locked packages, each installed once, in the cache of `binaries.py`."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import binaries

NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not answer, so that nothing is fetched."""
_WHOLE = "whole"


def off_line() -> dict[str, str]:
    """Return the variables with which a program reaches no network."""
    return dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)


def ensure(
    name: str, locks: Sequence[Path], message: str, install: Callable[[Path], None], version: str = sys.version
) -> Path:
    """Return the folder of an environment, installing it first if it is missing.

    Safe to call from several processes at once: one installs, the others wait.

    Args:
        name: name of the environment.
        locks: lock files of its packages. Other contents are another environment.
        message: text to write before it is installed.
        install: function that makes the environment in a folder. Its errors are raised, and the next call tries again.
        version: version of its Python in full.
    """
    digest = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks) + version.encode()).hexdigest()[:16]
    folder = binaries.cache_folder() / f"{name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _WHOLE).exists():
            binaries.say(message)
            shutil.rmtree(folder, ignore_errors=True)
            install(folder)
            (folder / _WHOLE).touch()
    return folder


def install_wheels(folder: Path, lock: Path) -> str:
    """Make an environment of this Python with the wheels of a lock file. Return pip's error, or an empty text."""
    venv.create(folder, with_pip=True)
    options = ("--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:")
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", *options, "-r", str(lock)]
    return run(command)


def run(command: Sequence[str | Path]) -> str:
    """Run a command. Return the end of what it wrote to standard error if it failed, else an empty text."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    return (done.stderr.strip()[-1000:] or f"exit status {done.returncode}") if done.returncode else ""
