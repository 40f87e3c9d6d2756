"""Queue in which namespaces take turns."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeAlias, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)
Rank: TypeAlias = tuple[float, ...]

SPARE_NAMESPACES = 64
"""Number of namespaces remembered, beyond twice those in line, before unneeded ones are dropped."""


class FairQueue(Generic[ItemT]):
    """Queue of distinct items. Each item waits for one or several namespaces.

    The namespace that has used least is next. A namespace that joins starts level with the others, so that idle time
    gives no priority. Within a namespace the lowest rank goes first, then the oldest item.
    """

    def __init__(self) -> None:
        self._entries: dict[ItemT, dict[str, int]] = {}
        """For each item and each of its namespaces, the number of its entry in that namespace's line."""
        self._lines: dict[str, list[tuple[Rank, int, ItemT]]] = {}
        """Heap of entries by namespace. An entry that its item no longer has is skipped."""
        self._places: dict[str, tuple[float, int]] = {}
        """Use of each namespace, and the number of its place among those with the same use."""
        self._order: list[tuple[tuple[float, int], str]] = []
        """Heap of places. A place that its namespace no longer has is skipped."""
        self._used: dict[str, float] = {}
        self._least = 0.0
        """Use of the namespace that was last to have its turn."""
        self._number = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: ItemT) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._entries)

    def push(self, item: ItemT, namespace: str = "", rank: Rank = ()) -> None:
        """Add an item to the queue of a namespace, or change its rank in that queue."""
        number = next(self._number)
        self._entries.setdefault(item, {})[namespace] = number
        heapq.heappush(self._lines.setdefault(namespace, []), (rank, number, item))
        if namespace not in self._places:
            self._used[namespace] = max(self._used.get(namespace, 0.0), self._least)
            self._move_to_back(namespace)

    def withdraw(self, item: ItemT, namespace: str) -> None:
        """Remove an item from the queue of a namespace."""
        entries = self._entries.get(item, {})
        entries.pop(namespace, None)
        if not entries:
            self.remove(item)

    def remove(self, item: ItemT) -> None:
        """Remove an item from the queues of all namespaces."""
        self._entries.pop(item, None)
        self._forget_idle_namespaces()

    def pop(self, may_run: Callable[[ItemT, str], bool] = lambda item, namespace: True) -> tuple[ItemT, str] | None:
        """Remove the next item that may run, and return it with its namespace. If no item may run, return None.

        The caller must add the item's use with `charge`.

        Args:
            may_run: function that returns whether the first item of a namespace may run.
        """
        namespace = self._next_namespace(may_run)
        if namespace is None:
            return None
        self._least = self._used[namespace]
        _, _, item = heapq.heappop(self._lines[namespace])
        del self._entries[item]
        self._move_to_back(namespace)
        self._forget_idle_namespaces()
        return item, namespace

    def charge(self, namespace: str, amount: float) -> None:
        """Add `amount` to the recorded use of a namespace.

        If no item of any namespace waits, record nothing, because the use delayed no one.
        """
        if self._entries:
            self._used[namespace] = max(self._used.get(namespace, 0.0) + amount, self._least)
            if namespace in self._places:
                self._move_to_back(namespace)

    def _move_to_back(self, namespace: str) -> None:
        """Move a namespace behind all others of equal use."""
        place = self._places[namespace] = (self._used[namespace], next(self._number))
        heapq.heappush(self._order, (place, namespace))

    def _next_namespace(self, may_run: Callable[[ItemT, str], bool]) -> str | None:
        """Return the next namespace whose first item may run, or None."""
        aside = []
        chosen = None
        while self._order and chosen is None:
            place, namespace = self._order[0]
            if self._places.get(namespace) != place:
                heapq.heappop(self._order)
            elif (item := self._first_item(namespace)) is None:
                heapq.heappop(self._order)
                del self._places[namespace], self._lines[namespace]
            elif not may_run(item, namespace):
                aside.append(heapq.heappop(self._order))
            elif place[0] < self._least:
                # It could not run for a while, which gives no priority either.
                self._used[namespace] = self._least
                self._move_to_back(namespace)
            else:
                chosen = namespace
        for entry in aside:
            heapq.heappush(self._order, entry)
        return chosen

    def _first_item(self, namespace: str) -> ItemT | None:
        """Return the next item in a namespace's line, or None."""
        line = self._lines[namespace]
        while line:
            _, number, item = line[0]
            if self._entries.get(item, {}).get(namespace) == number:
                return item
            heapq.heappop(line)
        return None

    def _forget_idle_namespaces(self) -> None:
        """Forget namespaces without waiting items."""
        if not self._entries:
            for table in (self._lines, self._places, self._used):
                table.clear()
            self._order.clear()
            self._least = 0.0
        elif len(self._used) > 2 * len(self._places) + SPARE_NAMESPACES:
            self._used = {name: used for name, used in self._used.items() if name in self._places or used > self._least}
