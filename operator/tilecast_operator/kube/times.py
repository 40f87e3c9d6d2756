"""Times as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(time_s: float) -> str:
    """Return a Unix time, in seconds, as Kubernetes writes times."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: object) -> float | None:
    """Return the Unix time of a text that Kubernetes wrote, in seconds; None if it is no time."""
    try:
        time = datetime.fromisoformat(str(text)[:64])
    except ValueError:
        return None
    return time.replace(tzinfo=time.tzinfo or UTC).timestamp()
