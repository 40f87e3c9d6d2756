"""Processes that end with the one that started them, and a look at those that did not.

Linux has both: a process may ask to be killed when its parent ends, and may take the place of init for its orphans. On
other systems a process that is killed leaves its children behind, as ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

MARK = "RUN_OF_TILECAST_TESTS"
"""Environment variable that the processes of one run of the tests have in common."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends: `preexec_fn` of a child, or its first call."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of whatever those leave behind that this process starts, so that it can wait for them."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_CHILD_SUBREAPER, 1)


def has_ended(pid: int) -> bool:
    """Whether a process is gone. A child that has exited is taken off the system's table, with all its threads."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Whether a process of that id runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # Where nobody reaps orphans (a container without an init), the dead stay as zombies.
    try:
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return state[:1] != ["Z"]


def marked(mark: str) -> dict[int, str]:
    """Command lines of the processes that have the mark in their environment, by id, but for the caller's. Empty where
    there is no /proc."""
    entry, commands = f"{MARK}={mark}".encode(), dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = entry in (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if is_ours and command and int(folder.name) != os.getpid():
            commands[int(folder.name)] = command
    return commands
