"""Show the progress of long computations on standard error, if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PATIENCE_S = 2.0
"""Seconds after which a bar is shown."""

ItemT = TypeVar("ItemT")

_state: dict[str, bool] = {"is_quiet": False}
_shown: list[tuple[Timer, Progress]] = []
"""Progress bars that have not ended."""


def set_quiet(is_quiet: bool) -> None:
    """Turn progress off or on again."""
    _state["is_quiet"] = is_quiet


def track_progress(items: Sequence[ItemT], label: str) -> Iterator[ItemT]:
    """Yield the items. After `PATIENCE_S` seconds, show a bar with the time left on a terminal's standard error."""
    if not _is_shown():
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("left"),
    )
    with _show_after_delay(Progress(*columns, console=_make_console(), transient=True, redirect_stdout=False)) as bar:
        task = bar.add_task(label, total=len(items))
        for item in items:
            yield item
            bar.advance(task)


@contextmanager
def show_wait(label: str) -> Iterator[None]:
    """Show a label and the elapsed time while the `with` block runs. It is for work of unknown duration."""
    if not _is_shown():
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with _show_after_delay(Progress(*columns, console=_make_console(), transient=True, redirect_stdout=False)) as bar:
        bar.add_task(label, total=None)
        yield


def end_progress() -> None:
    """Remove all bars from the terminal, including those of loops that an error ended early."""
    while _shown:
        timer, bar = _shown.pop()
        timer.cancel()
        timer.join()
        bar.stop()


def _is_shown() -> bool:
    return sys.stderr.isatty() and not _state["is_quiet"]


def _make_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def _show_after_delay(bar: Progress) -> Iterator[Progress]:
    """Show a bar while the `with` block runs, but not in its first `PATIENCE_S` seconds."""
    timer = Timer(max(PATIENCE_S, 0.0), bar.start)
    timer.daemon = True
    _shown.append((timer, bar))
    timer.start()
    try:
        yield bar
    finally:
        if (timer, bar) in _shown:
            _shown.remove((timer, bar))
            timer.cancel()
            timer.join()
            bar.stop()
