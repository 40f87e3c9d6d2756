"""Processes that end with the one that started them, and checks for processes that did not end.

Linux supports both: a process may request to be killed when its parent ends, and may take the place of init for its
orphans. On other systems a killed process leaves its children behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MARK = "RUN_OF_TILECAST_TESTS"
"""Environment variable that the processes of one test run have in common."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Arrange for this process to be killed when the thread that started it ends.

    Use it as `preexec_fn` of a child, or as its first call.
    """
    if _LIBC is not None:
        _LIBC.prctl(_SET_PDEATHSIG, signal.SIGKILL)


def start_logged(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that ends with the calling thread, and append its output to a file.

    Args:
        command: program and arguments.
        log: the file.
        environment: environment of the program; that of this process by default.
        folder: working directory of the program; that of this process by default.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants of this process, so that it can wait for them."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_CHILD_SUBREAPER, 1)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone.

    A child that has exited is removed from the process table, with all its threads.
    """
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Return whether a process with that id runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # If nobody reaps orphans (in a container without an init), ended processes stay as zombies.
    try:
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return state[:1] != ["Z"]


def marked(mark: str, proc: Path = Path("/proc")) -> dict[int, str]:
    """Return the command lines of the processes with the mark in their environment, by id, except the caller's.

    A process has neither environment nor arguments for a moment while it executes a program, though its parent already
    goes on. Processes without either are therefore read again, for at most 0.2 s in all.

    Empty if there is no /proc.
    """
    entry, commands, ends_s = f"{MARK}={mark}".encode(), dict[int, str](), time.monotonic() + 0.2
    for folder in proc.glob("[0-9]*"):
        try:
            while not all(texts := [(folder / name).read_bytes() for name in ("environ", "cmdline")]):
                # Kernel threads and zombies have no program, and never get an environment.
                (folder / "exe").readlink()
                if time.monotonic() > ends_s:
                    break
                time.sleep(0.005)
        except OSError:
            continue
        environment, arguments = texts
        command = arguments.replace(b"\0", b" ").decode(errors="replace").strip()
        if entry in environment.split(b"\0") and command and int(folder.name) != os.getpid():
            commands[int(folder.name)] = command
    return commands
