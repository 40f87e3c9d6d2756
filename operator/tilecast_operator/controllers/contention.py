"""Objects that another operator of Tilecast answers too, and otherwise: they are left to it for a growing while.

Two releases over the same namespaces with different settings would write over each other's answers for ever. Each
signs what it writes (`status.writer`), so that one which finds an answer of another in the place of its own, although
nobody has asked anything new, knows whose it is. Replicas of one release sign alike, and never contend.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tilecast_operator.cluster.documents import Note
from tilecast_operator.cluster.kinds import Key
from tilecast_operator.controllers.runtime import SharedContext

log = logging.getLogger("tilecast")

FREE = 1
"""Answers of another that are written over at once: it may have ended since."""
FIRST_PAUSE_S, MOST_PAUSE_S = 60.0, 1800.0
CALM = 4.0
"""An answer that has stood for so many times the last pause is contended no more."""
TELL_S = 600.0
"""The log names another no more often."""
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 32.0
"""Bounds of the wait after a write that somebody else's came between; it doubles with each in a row."""
EARLIER = "an operator of an earlier release"
UNSIGNED = "another release"
"""Who answers jobs of other kinds, whose annotations nobody signs."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An answer of ours, and what became of it."""

    generation: int
    digest: bytes
    written_s: float
    replaced: int = 0
    """How often an answer of another has taken its place."""
    by: bytes = b""
    """Digest of the one that has."""
    until_s: float = 0.0
    """Until when the object is left to the other."""

    @property
    def pause_s(self) -> float:
        """How long the object is left to the other."""
        return min(FIRST_PAUSE_S * 2.0 ** min(max(self.replaced - FREE - 1, 0), 16), MOST_PAUSE_S)

    def is_calm(self, now_s: float) -> bool:
        """Whether our answer has stood long enough."""
        return now_s >= max(self.until_s, self.written_s) + CALM * self.pause_s

    def is_contended(self, now_s: float) -> bool:
        """Whether the object is left to the other, or was until a while ago."""
        return self.replaced > FREE and not self.is_calm(now_s)


def met(claim: Claim, generation: int, digest: bytes, now_s: float) -> Claim | None:
    """The claim after an answer of another was found; None where it is in the place of none of ours.

    Args:
        claim: what was written here last.
        generation: of the object now.
        digest: of the answer that was found.
        now_s: by a clock that only runs forward.
    """
    if claim.generation != generation or claim.digest == digest:
        return None
    if claim.by == digest or now_s < claim.until_s:
        return replace(claim, by=digest)
    after = replace(claim, replaced=1 if claim.is_calm(now_s) else claim.replaced + 1, by=digest)
    return replace(after, until_s=now_s + after.pause_s) if after.replaced > FREE else after


@dataclass(frozen=True, slots=True)
class Lost:
    """Writes of an answer in a row that failed with a conflict."""

    generation: int
    count: int
    until_s: float
    """When the next is tried, at the earliest."""


class Contention:
    """The answers of this operator. Belongs to one event loop.

    Args:
        context: whose settings say who this operator is.
        clock: seconds, only running forward.
    """

    def __init__(self, context: SharedContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._clock = clock
        self._claims: dict[Key, Claim] = {}
        self._named_at: dict[str, float] = {}
        """When the log has named another."""
        self._lost: dict[Key, Lost] = {}
        context.metrics.contended.set_function(self.count)
        context.leadership.listen(self._lead)

    @property
    def own(self) -> str:
        """How this operator signs: by its release's Lease, which all replicas share, or by its own name."""
        return self._context.settings.lease or self._context.settings.instance

    def count(self) -> int:
        """How many objects are contended."""
        now_s = self._clock()
        return sum(claim.is_contended(now_s) for claim in self._claims.values())

    def wrote(self, key: Key, generation: int, digest: bytes) -> None:
        """Take note of an answer that was written."""
        before = self._claims.get(key)
        replaced = before.replaced if before is not None and before.generation == generation else 0
        self._claims[key] = Claim(generation, digest, self._clock(), replaced)
        self._lost.pop(key, None)

    def lost(self, key: Key, generation: int) -> None:
        """Take note of a write that failed because the object had changed since it was read.

        Two operators that write an object's annotations, one after the other, each let the other's write of the status
        fail. A random wait lets one of them finish.
        """
        before = self._lost.get(key)
        count = before.count + 1 if before is not None and before.generation == generation else 1
        wait_s = min(FIRST_WAIT_S * 2.0 ** min(count - 1, 16), MOST_WAIT_S)
        self._lost[key] = Lost(generation, count, self._clock() + wait_s * random.uniform(0.5, 1.5))  # noqa: S311

    def waits(self, key: Key, generation: int) -> bool:
        """Return whether an object is not written yet, after writes that were lost; its key is worked off after that.

        Whoever has changed the specification since is answered at once.
        """
        lost, now_s = self._lost.get(key), self._clock()
        if lost is None or lost.generation != generation or now_s >= lost.until_s:
            return False
        self._context.runtime.add(key, lost.until_s - now_s)
        return True

    def forget(self, key: Key) -> None:
        """Let go of an object that is gone."""
        self._claims.pop(key, None)
        self._lost.pop(key, None)

    async def yields(self, key: Key, uid: str, writer: str | None, generation: int, digest: bytes) -> bool:
        """Whether an object is left to another operator for now; the key is worked off anew after that.

        Args:
            key: of the object.
            uid: of the same.
            writer: who signed the answer that it has; None where nobody did.
            generation: of the object.
            digest: of that answer.
        """
        claim, now_s = self._claims.get(key), self._clock()
        if claim is None or writer == self.own or (after := met(claim, generation, digest, now_s)) is None:
            return False
        self._tell(key, writer or EARLIER)
        if after.replaced > FREE and after.until_s != claim.until_s and claim.replaced <= FREE:
            text = contended(writer or EARLIER, self.own)
            await self._context.writer.post(key, uid, Note("Warning", "Contended", text))
        self._claims[key] = after
        if after.until_s <= now_s:
            return False
        self._context.runtime.add(key, after.until_s - now_s)
        return True

    def _lead(self, is_leading: bool) -> None:
        """Forget what was written once another replica leads: answers about jobs of other kinds are not signed."""
        if not is_leading:
            self._claims.clear()

    def _tell(self, key: Key, other: str) -> None:
        """Name another operator in the log, and not again while it goes on."""
        now_s = self._clock()
        if now_s >= self._named_at.get(other, -math.inf) + TELL_S and not self.count():
            self._named_at[other] = now_s
            log.warning("%s, the first of perhaps many: %s", key, contended(other, self.own))


def contended(other: str, own: str) -> str:
    """The words of the log and of the Event."""
    return (
        f"{other} answers it too, and otherwise than {own}: each leaves it to the other for minutes; give each release "
        "namespaces of its own (shard.namespaceSelector), or uninstall one"
    )
