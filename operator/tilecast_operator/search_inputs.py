"""Inputs of the search for a job's plans, and the version numbers of the pools that it searches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilecast.advice import Request
from tilecast_operator.kube.fair_limiter import PermitRequest
from tilecast_operator.observed.earlier_runs import EarlierRuns
from tilecast_operator.outcome import AdviceRefusal


@dataclass(frozen=True, slots=True)
class SearchInputs:
    """Inputs of the search for a job's plans, except the pools. If the job cannot be read, `request` has the reason."""

    key: bytes
    request: Request | AdviceRefusal
    has_config_map: bool = False
    """Whether part of the request is in a ConfigMap, which is not watched."""
    namespace: str = ""
    is_held: bool = False
    """Whether the start of a job waits for the advice."""
    own: EarlierRuns = field(default_factory=EarlierRuns)
    """Earlier runs of the job."""
    runs_hash: str = ""
    """Digest of these runs and of everything else that affects the job's alternatives. Empty without runs."""

    @property
    def permit_request(self) -> PermitRequest:
        """Request for a permit to search."""
        return PermitRequest(self.namespace, self.is_held)


@dataclass(frozen=True, slots=True)
class PoolVersions:
    """Version numbers of the pools. A number changes with the pools and with the corrections learned from runs."""

    numbers: Mapping[str, int]
    """Number for each namespace with runs of its own. The empty name has the number for all others."""

    def get_version(self, namespace: str) -> int:
        """Return the version number of a namespace's pools, or 0 if there are no pools."""
        return self.numbers.get(namespace, self.numbers.get("", 0))
