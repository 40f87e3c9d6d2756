"""Read the container's memory limit, and the number of processes killed in it, from its control group.

Control groups v2 and v1 have different files (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
A container sees its own group at the root.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MIB = 2**20
UNLIMITED_BYTES = 1 << 60
"""Values from here on mean no limit: v1 has the largest multiple of a page, v2 the word `max`."""


def read_memory_limit_bytes(root: Path) -> int | None:
    """Return the container's memory limit in bytes. Return None if there is no limit or it cannot be read."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read_file(root / name).strip()
        if text:
            return int(text) if text.isdecimal() and int(text) < UNLIMITED_BYTES else None
    return None


def describe_memory_shortage(memory_mib: int, root: Path) -> str:
    """Return why the container's limit is too low for a process of `memory_mib`, or an empty text if it suffices.

    With control groups v2, a process that uses too much memory may end the whole container, including the operator.
    """
    limit_bytes = read_memory_limit_bytes(root)
    if limit_bytes is None or limit_bytes >= memory_mib * MIB:
        return ""
    return (
        f"TILECAST_SEARCH_MEMORY_MIB: {memory_mib} is more than the {limit_bytes // MIB} MiB of this container; lower "
        "it, or raise resources.limits.memory"
    )


def count_oom_kills(root: Path) -> int:
    """Return how many of the container's processes the kernel killed for lack of memory, or 0 if unknown."""
    for name in ("memory.events", "memory/memory.oom_control"):
        for line in _read_file(root / name).splitlines():
            key, _, count = line.partition(" ")
            if key == "oom_kill" and count.strip().isdecimal():
                return int(count)
    return 0


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
