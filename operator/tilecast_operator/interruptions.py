"""Interrupted searches, and when each is tried again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

from tilecast_operator.kube.times import format_time
from tilecast_operator.outcome import SEARCH_INTERRUPTED, AdviceRefusal
from tilecast_operator.search_process import Cause, SearchInterruptedError

FIRST_S, FACTOR, MOST_S = 60.0, 4.0, 6 * 3600.0
"""Seconds before the second attempt, factor of each further wait, and longest wait in seconds."""
MOST = 4096
"""Most searches that are remembered. The oldest are forgotten first."""

_LESS = "ask for less: fewer constraints left open, precisions or batch sizes, or a smaller model"
REMEDIES: Mapping[Cause, str] = {
    "timeout": f"{_LESS}; or have the administrator raise TILECAST_SEARCH_SECONDS",
    "memory": f"{_LESS}; or have the administrator raise TILECAST_SEARCH_MEMORY_MIB and the memory limit of the pod",
    "died": "the operator's log has the rest",
}


@dataclass(frozen=True, slots=True)
class Interruption:
    """The last interruption of a search."""

    tries: int
    due_s: float
    """Time of the next attempt, by the monotonic clock, in seconds."""
    answer: AdviceRefusal


def find_retry_wait_s(tries: int) -> float:
    """Return the wait in seconds before the next attempt, after `tries` interrupted attempts."""
    return min(FIRST_S * FACTOR ** min(tries - 1, 16), MOST_S)


class InterruptedSearches:
    """Interrupted searches, by search key. Belongs to one event loop.

    Args:
        clock: Unix time for texts, in seconds.
        monotonic: Monotonic clock for retries, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._known: OrderedDict[Hashable, Interruption] = OrderedDict()

    def find_refusal(self, search_key: Hashable) -> AdviceRefusal | None:
        """Return the refusal to give as long as an interrupted search must wait for its next attempt, or None."""
        known = self._known.get(search_key)
        if known is None or known.due_s <= self._monotonic():
            return None
        return replace(known.answer, again_s=known.due_s - self._monotonic())

    def add_interruption(self, search_key: Hashable, error: SearchInterruptedError) -> AdviceRefusal:
        """Record an interruption. Return the refusal that applies until the next attempt."""
        before = self._known.pop(search_key, None)
        tries = 1 if before is None else before.tries + 1
        pause_s = find_retry_wait_s(tries)
        again = format_time(self._clock() + pause_s)
        text = f"the search {error.text} and was interrupted (try {tries}); it is tried again after {again}"
        answer = AdviceRefusal(SEARCH_INTERRUPTED, f"{text}; {REMEDIES[error.cause]}", again_s=pause_s)
        self._known[search_key] = Interruption(tries, self._monotonic() + pause_s, answer)
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        return answer

    def forget_search(self, search_key: Hashable) -> None:
        """Forget the interruptions of a search that has succeeded."""
        self._known.pop(search_key, None)
