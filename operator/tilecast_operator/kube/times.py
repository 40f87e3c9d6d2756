"""Format and parse times of Kubernetes."""

from __future__ import annotations

from datetime import UTC, datetime


def format_time(time_s: float) -> str:
    """Return a Unix time, in seconds, as text such as `2026-01-31T12:00:00Z`."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: object) -> float | None:
    """Return the Unix time of a Kubernetes timestamp, in seconds. For any other value, return None."""
    try:
        time = datetime.fromisoformat(str(text)[:64])
    except ValueError:
        return None
    return time.replace(tzinfo=time.tzinfo or UTC).timestamp()
