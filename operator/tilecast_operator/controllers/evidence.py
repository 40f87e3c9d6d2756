"""Reader of the target and the measured steps of a TrainingJob."""

from __future__ import annotations

from tilecast.api.status import TrainingJobStatus
from tilecast_operator.controllers.desired import Evidence
from tilecast_operator.controllers.observations import Observations
from tilecast_operator.controllers.scoring import Scores
from tilecast_operator.controllers.targets import Targets
from tilecast_operator.kube.cache import Stored
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.objects.view import View
from tilecast_operator.observed.calibrator import Score


class EvidenceReader:
    """Reader of targets and measured steps of TrainingJobs. Belongs to one event loop."""

    def __init__(self, targets: Targets, observations: Observations, scores: Scores) -> None:
        self._targets = targets
        self._observations = observations
        self._scores = scores

    async def read_evidence(
        self, key: Key, seen: Stored[View], document: Document, before: TrainingJobStatus
    ) -> Evidence:
        """Return the target and the measured steps of a job; raises as `Targets.find_target` does."""
        target = await self._targets.find_target(key, document)
        await self._observations.read_annotations(key, seen, before, target)
        return Evidence(target, self._scores.get_score(key), self._observations.find_refusal(key, document))

    def recall_score(self, key: Key, seen: Stored[View], *, is_leader: bool) -> bool:
        """Take over the score in a job's status; return whether it is new."""
        return self._scores.recall_score(key, seen, is_leader=is_leader)

    def is_scored(self, key: Key) -> bool:
        """Return whether a job has a measured step."""
        return self._scores.get_score(key) is not None

    def mark_written(self, key: Key, score: Score | None) -> None:
        """Record that the status of a job contains a score."""
        self._observations.mark_written(key, score)
