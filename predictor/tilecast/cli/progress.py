"""A progress bar for long computations."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

PATIENCE_S = 2.0
"""Seconds after which a bar is shown."""

ItemT = TypeVar("ItemT")


def track_progress(items: Sequence[ItemT], label: str) -> Iterator[ItemT]:
    """Yield the items. After `PATIENCE_S` seconds, show a progress bar on standard error if it is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    began = time.monotonic()
    with Progress(console=Console(stderr=True), transient=True, disable=False, auto_refresh=False) as bar:
        task = bar.add_task(label, total=len(items), visible=False)
        for done, item in enumerate(items):
            if time.monotonic() - began > PATIENCE_S:
                bar.update(task, completed=done, visible=True, refresh=True)
            yield item
