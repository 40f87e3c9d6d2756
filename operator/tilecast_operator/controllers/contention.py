"""Detect a second Tilecast operator that writes different advice to the same objects.

Two releases over the same namespaces with different settings would overwrite each other's advice forever. So each
release signs its statuses (`status.writer`). If an operator finds its advice replaced on an unchanged object, it leaves
the object to the other operator, for a time that grows with each replacement. Replicas of one release have the same
signature and never contend.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.kube.kinds import Key

log = logging.getLogger("tilecast")

FREE_OVERWRITES = 1
"""Number of times that another operator's advice is overwritten at once, because that operator may have ended."""
FIRST_PAUSE_S, MOST_PAUSE_S = 60.0, 1800.0
"""Shortest and longest time for which an object is left to the other operator, in seconds.

It doubles each time that advice of this operator is overwritten.
"""
CALM_FACTOR = 4.0
"""Multiple of the last pause without an overwrite after which advice no longer counts as contended."""
TELL_S = 600.0
"""Shortest time between two log entries that name the same other operator, in seconds."""
EARLIER = "an operator of an earlier release"
"""Name for an operator that did not sign its status."""
UNSIGNED = "another release"
"""Name for an unknown operator that annotated a job other than a TrainingJob. Such annotations have no signature."""


@dataclass(frozen=True, slots=True)
class WrittenAdvice:
    """The last advice that this operator wrote to an object, and how often another operator has overwritten it."""

    generation: int
    digest: bytes
    written_s: float
    replaced: int = 0
    """Number of times that another operator has overwritten it."""
    by: bytes = b""
    """Digest of the advice that last overwrote it."""
    until_s: float = 0.0
    """Time until which the object is left to the other operator."""

    @property
    def pause_s(self) -> float:
        """Seconds for which this operator does not write to the object after another operator has overwritten it."""
        return min(FIRST_PAUSE_S * 2.0 ** min(max(self.replaced - FREE_OVERWRITES - 1, 0), 16), MOST_PAUSE_S)

    def is_calm(self, now_s: float) -> bool:
        """Return whether the last overwrite is so long ago that the contention is over."""
        return now_s >= max(self.until_s, self.written_s) + CALM_FACTOR * self.pause_s

    def is_contended(self, now_s: float) -> bool:
        """Return whether another operator has repeatedly overwritten the advice, until recently."""
        return self.replaced > FREE_OVERWRITES and not self.is_calm(now_s)


def update_overwritten_advice(
    written: WrittenAdvice, generation: int, digest: bytes, now_s: float
) -> WrittenAdvice | None:
    """Return the updated record of this operator's advice if another operator has overwritten it, otherwise None.

    Args:
        written: The last advice that this operator wrote.
        generation: Generation of the object now.
        digest: Digest of the advice that is on the object now.
        now_s: Time of a monotonic clock, in seconds.
    """
    if written.generation != generation or written.digest == digest:
        return None
    if written.by == digest or now_s < written.until_s:
        return replace(written, by=digest)
    after = replace(written, replaced=1 if written.is_calm(now_s) else written.replaced + 1, by=digest)
    return replace(after, until_s=now_s + after.pause_s) if after.replaced > FREE_OVERWRITES else after


@dataclass(frozen=True, slots=True)
class WriteConflicts:
    """Number of consecutive writes to an object that failed with a conflict (409), and the time of the next try."""

    generation: int
    count: int
    until_s: float
    """Earliest time of the next try."""


class WriteContention:
    """Record of the advice that this operator wrote and others overwrote. Belongs to one event loop.

    Args:
        context: Shared context with the settings that identify this operator.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, context: SharedContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._clock = clock
        self._claims: StateTable[WrittenAdvice] = context.records.add_table()
        self._named_at: dict[str, float] = {}
        """Time at which each other operator was last named in the log."""
        self._lost: StateTable[WriteConflicts] = context.records.add_table()
        context.metrics.contended.set_function(self.count_contended)
        context.leadership.add_listener(self._on_leadership_change)

    @property
    def signature(self) -> str:
        """Signature of this operator: the name of the Lease that all replicas share, or of its instance."""
        return self._context.settings.lease or self._context.settings.instance

    def count_contended(self) -> int:
        """Return the number of objects to which two operators write."""
        now_s = self._clock()
        return sum(claim.is_contended(now_s) for claim in self._claims.values())

    def record_write(self, key: Key, generation: int, digest: bytes) -> None:
        """Record advice that this operator wrote to an object."""
        before = self._claims.get(key)
        replaced = before.replaced if before is not None and before.generation == generation else 0
        self._claims[key] = WrittenAdvice(generation, digest, self._clock(), replaced)
        self._lost.pop(key, None)

    def record_conflict(self, key: Key, generation: int) -> None:
        """Record a write that failed with a conflict (409), and delay the next try.

        Two operators that write to an object at the same time make each other's writes fail. A random delay lets one
        operator finish.
        """
        before = self._lost.get(key)
        count = before.count + 1 if before is not None and before.generation == generation else 1
        timings = self._context.timings
        wait_s = min(timings.conflict_first_s * 2.0 ** min(count - 1, 16), timings.conflict_most_s)
        self._lost[key] = WriteConflicts(generation, count, self._clock() + wait_s * random.uniform(0.5, 1.5))  # noqa: S311

    def must_wait(self, key: Key, generation: int) -> bool:
        """Return whether earlier conflicts still delay writes to an object. If so, schedule its key for later.

        A changed spec ends the delay.
        """
        lost, now_s = self._lost.get(key), self._clock()
        if lost is None or lost.generation != generation or now_s >= lost.until_s:
            return False
        self._context.runtime.add(key, lost.until_s - now_s)
        return True

    async def must_yield(self, key: Key, uid: str, writer: str | None, generation: int, digest: bytes) -> bool:
        """Return whether this operator must leave an object to another for now. If so, schedule its key for later.

        Args:
            key: Key of the object.
            uid: UID of the object.
            writer: Signature of the advice on the object, or None if it is not signed.
            generation: Generation of the object.
            digest: Digest of the advice on the object.
        """
        claim, now_s = self._claims.get(key), self._clock()
        if (
            claim is None
            or writer == self.signature
            or (after := update_overwritten_advice(claim, generation, digest, now_s)) is None
        ):
            return False
        self._log_other_operator(key, writer or EARLIER)
        if after.replaced > FREE_OVERWRITES and after.until_s != claim.until_s and claim.replaced <= FREE_OVERWRITES:
            text = describe_contention(writer or EARLIER, self.signature)
            await self._context.writer.post_event(key, uid, EventContent("Warning", "Contended", text))
        self._claims[key] = after
        if after.until_s <= now_s:
            return False
        self._context.runtime.add(key, after.until_s - now_s)
        return True

    def _on_leadership_change(self, is_leading: bool) -> None:
        """Forget the advice that this replica wrote when it loses the lead.

        Only advice for TrainingJobs is signed. Advice for other jobs that the new leader writes would look like that of
        another operator.
        """
        if not is_leading:
            self._claims.clear()

    def _log_other_operator(self, key: Key, other: str) -> None:
        """Log the name of another operator that writes to an object.

        Nothing is logged if the name was logged recently, or if the operators already contend for other objects.
        """
        now_s = self._clock()
        if now_s >= self._named_at.get(other, -math.inf) + TELL_S and not self.count_contended():
            self._named_at[other] = now_s
            log.warning("%s, the first of perhaps many: %s", key, describe_contention(other, self.signature))


def describe_contention(other_signature: str, signature: str) -> str:
    """Return a text that says that two operators write to an object, for the log and the Event."""
    return (
        f"{other_signature} answers it too, and otherwise than {signature}: each leaves it to the other for minutes; "
        "give each release namespaces of its own (shard.namespaceSelector), or uninstall one"
    )
