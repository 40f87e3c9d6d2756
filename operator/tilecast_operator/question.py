"""What a job asks, and the pools that it is answered by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilecast.advise import Request
from tilecast_operator.answer import Declined
from tilecast_operator.observed.own_runs import OwnRuns
from tilecast_operator.turns import TurnClaim


@dataclass(frozen=True, slots=True)
class Question:
    """What a job asks: everything that decides its advice but the pools, or why that cannot be said."""

    key: bytes
    request: Request | Declined
    has_config_map: bool = False
    """Whether part of it is in a ConfigMap, which is not watched."""
    namespace: str = ""
    is_held: bool = False
    """Whether the start of a job waits for the answer."""
    own: OwnRuns = field(default_factory=OwnRuns)
    """Earlier runs of the job."""
    runs_hash: str = ""
    """Digest of them and of what else decides the job's alternatives; empty where there are none."""

    @property
    def claim(self) -> TurnClaim:
        """Who asks."""
        return TurnClaim(self.namespace, self.is_held)


@dataclass(frozen=True, slots=True)
class PoolVersions:
    """Numbers of the pools, with what runs teach of them: others get another number."""

    numbers: Mapping[str, int]
    """By namespace that has had runs; those of all others stand under the empty name."""

    def of(self, namespace: str) -> int:
        """That of the pools that jobs of a namespace are answered by; 0 while there are none."""
        return self.numbers.get(namespace, self.numbers.get("", 0))
