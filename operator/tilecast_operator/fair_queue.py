"""The order of what waits: namespaces take turns."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeAlias, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)
Rank: TypeAlias = tuple[float, ...]

SPARE_NAMESPACES = 64
"""Namespaces that are remembered beside those that wait, before they are looked through."""


class FairQueue(Generic[ItemT]):
    """Items that wait, each once, for one namespace or for several.

    The namespace that has used least is next. One that comes to wait begins where the others are, for idle time earns
    nothing. Of its items the lowest rank goes first, then the oldest.
    """

    def __init__(self) -> None:
        self._entries: dict[ItemT, dict[str, int]] = {}
        """Numbers of each item's entries in the lines of the namespaces that it waits for."""
        self._lines: dict[str, list[tuple[Rank, int, ItemT]]] = {}
        """Heaps; an entry that its item has no longer is passed over."""
        self._places: dict[str, tuple[float, int]] = {}
        """What each namespace has used, and when it came to stand there."""
        self._order: list[tuple[tuple[float, int], str]] = []
        """Heap of the places; one that its namespace has no longer is passed over."""
        self._used: dict[str, float] = {}
        self._least = 0.0
        """Used by the namespace whose turn it was last."""
        self._number = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: ItemT) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._entries)

    def push(self, item: ItemT, namespace: str = "", rank: Rank = ()) -> None:
        """Add an item, another namespace that it waits for, or another rank that it has there."""
        number = next(self._number)
        self._entries.setdefault(item, {})[namespace] = number
        heapq.heappush(self._lines.setdefault(namespace, []), (rank, number, item))
        if namespace not in self._places:
            self._used[namespace] = max(self._used.get(namespace, 0.0), self._least)
            self._place(namespace)

    def withdraw(self, item: ItemT, namespace: str) -> None:
        """Have an item no longer wait for a namespace."""
        entries = self._entries.get(item, {})
        entries.pop(namespace, None)
        if not entries:
            self.remove(item)

    def remove(self, item: ItemT) -> None:
        """Take an item out."""
        self._entries.pop(item, None)
        self._tidy()

    def pop(self, may: Callable[[ItemT, str], bool] = lambda item, namespace: True) -> tuple[ItemT, str] | None:
        """The item whose turn it is, and for which namespace; None where none may go on. `charge` says what it uses.

        Args:
            may: whether the first item of a namespace may go on.
        """
        namespace = self._next(may)
        if namespace is None:
            return None
        self._least = self._used[namespace]
        _, _, item = heapq.heappop(self._lines[namespace])
        del self._entries[item]
        self._place(namespace)
        self._tidy()
        return item, namespace

    def charge(self, namespace: str, amount: float) -> None:
        """Add to what a namespace has used; where nobody waits none is ahead of others."""
        if self._entries:
            self._used[namespace] = max(self._used.get(namespace, 0.0) + amount, self._least)
            if namespace in self._places:
                self._place(namespace)

    def _place(self, namespace: str) -> None:
        """Have a namespace stand where it belongs, behind those that have used as much."""
        place = self._places[namespace] = (self._used[namespace], next(self._number))
        heapq.heappush(self._order, (place, namespace))

    def _next(self, may: Callable[[ItemT, str], bool]) -> str | None:
        """The first namespace that has an item which may go on."""
        aside = []
        chosen = None
        while self._order and chosen is None:
            place, namespace = self._order[0]
            if self._places.get(namespace) != place:
                heapq.heappop(self._order)
            elif (item := self._first(namespace)) is None:
                heapq.heappop(self._order)
                del self._places[namespace], self._lines[namespace]
            elif not may(item, namespace):
                aside.append(heapq.heappop(self._order))
            elif place[0] < self._least:
                # It might not go on for a while, which earns nothing either.
                self._used[namespace] = self._least
                self._place(namespace)
            else:
                chosen = namespace
        for entry in aside:
            heapq.heappush(self._order, entry)
        return chosen

    def _first(self, namespace: str) -> ItemT | None:
        """The first item of a namespace; entries that their items have no longer are dropped."""
        line = self._lines[namespace]
        while line:
            _, number, item = line[0]
            if self._entries.get(item, {}).get(namespace) == number:
                return item
            heapq.heappop(line)
        return None

    def _tidy(self) -> None:
        """Forget namespaces that nobody waits for."""
        if not self._entries:
            for table in (self._lines, self._places, self._used):
                table.clear()
            self._order.clear()
            self._least = 0.0
        elif len(self._used) > 2 * len(self._places) + SPARE_NAMESPACES:
            self._used = {name: used for name, used in self._used.items() if name in self._places or used > self._least}
