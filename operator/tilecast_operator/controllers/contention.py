"""Detection of a second operator of Tilecast that answers the same objects differently.

Two releases over the same namespaces with different settings would overwrite each other's answers for ever. Each
release therefore signs its statuses (`status.writer`). An operator that finds its answer to an unchanged object
replaced leaves the object to the other operator, for a time that grows with each replacement. Replicas of one release
sign alike and never contend.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.documents import Note
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.records import RecordPart

log = logging.getLogger("tilecast")

FREE_OVERWRITES = 1
"""Answers of another operator that are overwritten at once, since it may have ended meanwhile."""
FIRST_PAUSE_S, MOST_PAUSE_S = 60.0, 1800.0
"""Bounds of the time for which an object is left to the other operator, in seconds. It doubles with each answer of ours
that is replaced."""
CALM_FACTOR = 4.0
"""Multiple of the last pause after which an answer that still stands is no longer contended."""
TELL_S = 600.0
"""Shortest time between two log entries that name the same other operator, in seconds."""
EARLIER = "an operator of an earlier release"
"""Name of an operator that did not sign its status."""
UNSIGNED = "another release"
"""Name of an operator that answers jobs of other kinds: nobody signs their annotations."""


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """Last answer that this operator wrote to an object, and how often another operator has replaced it."""

    generation: int
    digest: bytes
    written_s: float
    replaced: int = 0
    """Number of times that another operator's answer has replaced it."""
    by: bytes = b""
    """Digest of the answer that replaced it last."""
    until_s: float = 0.0
    """Time until which the object is left to the other operator."""

    @property
    def pause_s(self) -> float:
        """Seconds for which the object is left to the other operator after a replacement."""
        return min(FIRST_PAUSE_S * 2.0 ** min(max(self.replaced - FREE_OVERWRITES - 1, 0), 16), MOST_PAUSE_S)

    def is_calm(self, now_s: float) -> bool:
        """Return whether the answer has not been replaced for so long that contention is over."""
        return now_s >= max(self.until_s, self.written_s) + CALM_FACTOR * self.pause_s

    def is_contended(self, now_s: float) -> bool:
        """Return whether two operators have contended for the object until recently."""
        return self.replaced > FREE_OVERWRITES and not self.is_calm(now_s)


def update_contested(claim: WrittenAnswer, generation: int, digest: bytes, now_s: float) -> WrittenAnswer | None:
    """Return a written answer updated after another operator's answer was found; None if it was not replaced.

    Args:
        claim: The last answer of this operator.
        generation: Generation of the object now.
        digest: Digest of the answer that was found.
        now_s: Time of a monotonic clock, in seconds.
    """
    if claim.generation != generation or claim.digest == digest:
        return None
    if claim.by == digest or now_s < claim.until_s:
        return replace(claim, by=digest)
    after = replace(claim, replaced=1 if claim.is_calm(now_s) else claim.replaced + 1, by=digest)
    return replace(after, until_s=now_s + after.pause_s) if after.replaced > FREE_OVERWRITES else after


@dataclass(frozen=True, slots=True)
class LostWrites:
    """Consecutive writes of an answer that failed with a conflict."""

    generation: int
    count: int
    until_s: float
    """Earliest time of the next try."""


class Contention:
    """Written answers of this operator and their replacements by others. Belongs to one event loop.

    Args:
        context: Shared context; its settings say who this operator is.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, context: SharedContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._clock = clock
        self._claims: RecordPart[WrittenAnswer] = context.records.add_part()
        self._named_at: dict[str, float] = {}
        """When the log last named each other operator."""
        self._lost: RecordPart[LostWrites] = context.records.add_part()
        context.metrics.contended.set_function(self.count_contended)
        context.leadership.add_listener(self._on_leadership_change)

    @property
    def signature(self) -> str:
        """Signature of this operator: the name of its Lease, which all replicas share, or of its instance."""
        return self._context.settings.lease or self._context.settings.instance

    def count_contended(self) -> int:
        """Return how many objects are contended."""
        now_s = self._clock()
        return sum(claim.is_contended(now_s) for claim in self._claims.values())

    def record_write(self, key: Key, generation: int, digest: bytes) -> None:
        """Record an answer that was written."""
        before = self._claims.get(key)
        replaced = before.replaced if before is not None and before.generation == generation else 0
        self._claims[key] = WrittenAnswer(generation, digest, self._clock(), replaced)
        self._lost.pop(key, None)

    def record_conflict(self, key: Key, generation: int) -> None:
        """Record a write that failed with a conflict, and delay the next try.

        If two operators write an object's annotations one after the other, each makes the other's write of the status
        fail. A random wait lets one of them finish.
        """
        before = self._lost.get(key)
        count = before.count + 1 if before is not None and before.generation == generation else 1
        timings = self._context.timings
        wait_s = min(timings.conflict_first_s * 2.0 ** min(count - 1, 16), timings.conflict_most_s)
        self._lost[key] = LostWrites(generation, count, self._clock() + wait_s * random.uniform(0.5, 1.5))  # noqa: S311

    def must_wait(self, key: Key, generation: int) -> bool:
        """Return whether a write is still delayed after conflicts; if so, schedule the key for later.

        A change of the spec ends the wait.
        """
        lost, now_s = self._lost.get(key), self._clock()
        if lost is None or lost.generation != generation or now_s >= lost.until_s:
            return False
        self._context.runtime.add(key, lost.until_s - now_s)
        return True

    async def must_yield(self, key: Key, uid: str, writer: str | None, generation: int, digest: bytes) -> bool:
        """Return whether an object is left to another operator for now; if so, schedule the key for later.

        Args:
            key: Key of the object.
            uid: UID of the object.
            writer: Signature of the answer on the object; None if it is not signed.
            generation: Generation of the object.
            digest: Digest of the answer on the object.
        """
        claim, now_s = self._claims.get(key), self._clock()
        if (
            claim is None
            or writer == self.signature
            or (after := update_contested(claim, generation, digest, now_s)) is None
        ):
            return False
        self._log_other_operator(key, writer or EARLIER)
        if after.replaced > FREE_OVERWRITES and after.until_s != claim.until_s and claim.replaced <= FREE_OVERWRITES:
            text = describe_contention(writer or EARLIER, self.signature)
            await self._context.writer.post_event(key, uid, Note("Warning", "Contended", text))
        self._claims[key] = after
        if after.until_s <= now_s:
            return False
        self._context.runtime.add(key, after.until_s - now_s)
        return True

    def _on_leadership_change(self, is_leading: bool) -> None:
        """Forget the answers of this replica when another replica leads.

        Answers about jobs of other kinds are not signed, so the new leader's would look like another operator's.
        """
        if not is_leading:
            self._claims.clear()

    def _log_other_operator(self, key: Key, other: str) -> None:
        """Log the name of another operator, unless it was logged recently or other objects are contended."""
        now_s = self._clock()
        if now_s >= self._named_at.get(other, -math.inf) + TELL_S and not self.count_contended():
            self._named_at[other] = now_s
            log.warning("%s, the first of perhaps many: %s", key, describe_contention(other, self.signature))


def describe_contention(other: str, own: str) -> str:
    """Return the text about contention for the log and the Event."""
    return (
        f"{other} answers it too, and otherwise than {own}: each leaves it to the other for minutes; give each release "
        "namespaces of its own (shard.namespaceSelector), or uninstall one"
    )
