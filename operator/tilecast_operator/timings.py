"""Waits of the controllers that are not settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControllerDelays:
    """Waits of the controllers, in seconds."""

    decide_s: float = 5.0
    """Longest time from first seeing a held job until its place is decided. Ten seconds are promised in total; the last
    writes take the rest."""
    plan_s: float = 3.0
    """Longest wait for the plan of the whole queue to include a held job; then the job's own advice decides."""
    owner_s: float = 3.0
    """Longest wait for what may be seen later than a held job. That is the TrainingJob that names a job which asks for
    no advice itself, or the job's queue."""
    release_most_s: float = 5.0
    """Longest wait between two tries to place or release a job."""
    webhook_s: float = 300.0
    """Longest time for which placing a job is retried while an admission webhook does not answer, such as that of a
    Kueue that is starting. No job can be released meanwhile either."""
    workload_s: float = 2.0
    """Longest wait for the Workload of a job. Kueue makes a later Workload of the job as placed."""
    poll_s: float = 0.2
    """Time between looks at what another controller has yet to create, and before the first retry of a release."""
    look_first_s: float = 1.0
    look_most_s: float = 300.0
    """Bounds of the time between two looks whether Kueue has admitted a job. The job's own events report an admission,
    but not that Kueue has given the job up."""
    look_least_s: float = 0.1
    """Shortest time until such a look when a job may soon be requeued."""
    requeue_again_s: float = 60.0
    """Time until the next look whether there is another flavor for a job, or whether the job can be changed."""
    conflict_first_s: float = 0.5
    conflict_most_s: float = 32.0
    """Bounds of the wait after a write that failed with a conflict; it doubles with each one in a row."""
    unserved_s: float = 5.0
    """Time until an object whose CRD was not served is written again."""
    tell_after_s: float = 10.0
    """Time that a job waits before a notice tells it why."""
    tell_again_s: float = 2.0
    tell_again_most_s: float = 60.0
    """Shortest wait for an answer before a notice, since the answer to a job that has waited for long may be at hand;
    the wait doubles with each look, so that ten thousand jobs that wait cost little."""
    first_list_s: float = 30.0
    """Time without a new object after which a first list is taken to be over, whatever the API server counts."""
    first_list_uncounted_s: float = 10.0
    """The same if the API server gives no count, as for nodes that a selector chooses."""
    review_holds_s: float = 60.0
    """Time for which the answer to a TokenReview is used again."""
