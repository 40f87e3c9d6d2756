"""Restrict a call to the files and the network access that the user allowed, whatever its arguments name.

A Python audit hook (PEP 578) sees every file that is opened, every program that is started and every connection. The
hook cannot be removed. It applies only inside `confine`, in the thread that entered it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilecast.spec import SpecError

OUTSIDE = "is outside the folders that this server may read"
"""What an error says of a path that may not be read."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Files, kubectl contexts and models that tools may read besides their arguments. By default there are none."""

    folders: tuple[Path, ...] = ()
    """Folders whose files may be read."""
    contexts: tuple[str, ...] = ()
    """kubectl contexts that may be queried."""
    allows_hub: bool = False
    """Whether models may be read from the Hugging Face Hub and its local cache."""


_active = threading.local()
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn")
_CHANGES = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.kill", "shutil.rmtree", "shutil.move", "shutil.copyfile",
)  # fmt: skip


@contextmanager
def confine(permissions: Permissions) -> Iterator[None]:
    """Restrict the code in the `with` block, in this thread, to what the permissions allow.

    Raises:
        SpecError: inside the block, if anything else is read, written, started or connected to.
    """
    _install_audit_hook()
    _active.permissions, _active.refusal = permissions, None
    try:
        yield
    except Exception:
        # Code in between may have taken the refusal for an error of its own.
        if _active.refusal is not None:
            raise _active.refusal from None
        raise
    finally:
        _active.permissions = None


@cache
def _install_audit_hook() -> None:
    sys.addaudithook(_check_event)


def _check_event(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise SpecError if an audit event is not allowed in this thread, and store the error."""
    permissions: Permissions | None = getattr(_active, "permissions", None)
    if permissions is None:
        return
    try:
        _require_allowed(event, arguments, permissions)
    except SpecError as error:
        _active.refusal = error
        raise


def _require_allowed(event: str, arguments: tuple[Any, ...], permissions: Permissions) -> None:
    """Raise SpecError if the permissions do not allow an audit event."""
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITING and not _is_null(path):
            _check_change(path, permissions)
        else:
            _check_path(path, permissions)
    elif event in ("os.listdir", "os.scandir"):
        _check_path("." if arguments[0] is None else arguments[0], permissions)
    elif event.startswith("socket.") and event != "socket.__new__":
        if not permissions.allows_hub:
            raise SpecError("network", "is not allowed to this server", "start it with --hub for models of the Hub")
    elif event in _PROGRAMS:
        if not (permissions.contexts and event == "subprocess.Popen" and Path(str(arguments[0])).name == "kubectl"):
            raise SpecError("program", "may not be started by this server", "start it with --context NAME for kubectl")
    elif event in _CHANGES:
        for path in arguments:
            if isinstance(path, str | bytes | os.PathLike):
                _check_change(path, permissions)


def _check_path(path: Any, permissions: Permissions) -> None:
    """Raise SpecError unless a path is below an allowed folder, or is part of Python or of an installed package."""
    if isinstance(path, int) or _is_null(path):
        return
    if not permissions.allows_hub and _is_in_folders(path, _list_hub_folders()):
        problem = "is one of the Hugging Face Hub, which this server does not read"
        raise SpecError("model", problem, "name a preset or give its config.json (agents: start the server with --hub)")
    folders = (*permissions.folders, *_list_own_folders(), *(_HUB_READS if permissions.allows_hub else ()))
    if not _is_in_folders(path, folders) and not _is_cached(path, permissions):
        raise SpecError(_format_file_name(path), OUTSIDE, "start it with --read FOLDER")


def _check_change(path: Any, permissions: Permissions) -> None:
    """Raise SpecError if a path to be written or removed is outside the Hub's cache."""
    if not _is_cached(path, permissions):
        raise SpecError(_format_file_name(path), "would be changed", "tools only read")


def _is_cached(path: Any, permissions: Permissions) -> bool:
    """Return whether a path is in the Hub's cache and the permissions allow the Hub."""
    return permissions.allows_hub and _is_in_folders(path, _list_hub_folders())


def _is_in_folders(path: Any, folders: Iterable[Path]) -> bool:
    """Return whether a path, with links resolved, is one of `folders` or below one of them."""
    real = Path(os.path.realpath(os.fsdecode(path)))
    return any(real.is_relative_to(folder) for folder in folders)


def _is_null(path: object) -> bool:
    return path in (os.devnull, os.fsencode(os.devnull))


def _format_file_name(path: object) -> str:
    return os.fsdecode(path)[:120] if isinstance(path, str | bytes | os.PathLike) else "file"


@cache
def _list_own_folders() -> tuple[Path, ...]:
    """Return the folders of Python, its packages and Tilecast, from which modules and tables are loaded on demand."""
    paths = sysconfig.get_paths()
    named: list[str | Path] = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    tilecast = Path(__file__).parents[1]
    system = ["/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"]
    return tuple(Path(os.path.realpath(one)) for one in (*named, *packages, tilecast, *system))


@cache
def _list_hub_folders() -> tuple[Path, ...]:
    """Return the folders of the Hub's cache."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = os.environ.get("HF_HOME") or cache_home / "huggingface"
    named = [os.environ[key] for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") if os.environ.get(key)]
    return tuple(Path(os.path.realpath(one)) for one in (home, *named))


_HUB_READS = (Path("/etc/ssl"), Path("/etc/resolv.conf"), Path("/etc/hosts"), Path("/etc/nsswitch.conf"))
"""System files that programs read to find certificates and name servers."""
