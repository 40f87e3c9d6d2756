"""What is known of a TrainingJob that runs: the job that it names, and its measured steps."""

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
    """Finds out what is known of jobs that run. Belongs to one event loop."""

    def __init__(self, targets: Targets, observations: Observations, scores: Scores) -> None:
        self._targets = targets
        self._observations = observations
        self._scores = scores

    async def read_evidence(
        self, key: Key, seen: Stored[View], document: Document, before: TrainingJobStatus
    ) -> Evidence:
        """Return what is known of a job; raises as `Targets.find` does."""
        target = await self._targets.find_target(key, document)
        await self._observations.read_annotations(key, seen, before, target)
        return Evidence(target, self._scores.get_score(key), self._observations.find_refusal(key, document))

    def recall_score(self, key: Key, seen: Stored[View], *, is_leader: bool) -> bool:
        """Record the score that a job's status keeps; return whether that is news."""
        return self._scores.recall_score(key, seen, is_leader=is_leader)

    def is_scored(self, key: Key) -> bool:
        """Return whether a step of a job was measured."""
        return self._scores.get_score(key) is not None

    def mark_written(self, key: Key, score: Score | None) -> None:
        """Record that the status of a job contains this score."""
        self._observations.mark_written(key, score)
