"""Waits of the controllers that are not settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControllerDelays:
    """Waits of the controllers, in seconds."""

    decide_s: float = 5.0
    """Longest time from first seeing a held job until its place is decided.

    Ten seconds in total are promised. The last writes take the rest.
    """
    plan_s: float = 3.0
    """Longest wait until the queue plan includes a held job. After that, the job's own advice decides."""
    owner_s: float = 3.0
    """Longest wait for objects that may be seen later than a held job.

    They are the job's queue, and the TrainingJob of a job that does not request advice itself.
    """
    release_most_s: float = 5.0
    """Longest wait between two attempts to place or release a job."""
    webhook_s: float = 300.0
    """Longest time to retry placing a job while an admission webhook does not answer, such as that of a starting Kueue.

    No job can be released in that time either.
    """
    workload_s: float = 2.0
    """Longest wait for the Workload of a job. If Kueue creates it later, it has the job's placement already."""
    poll_s: float = 0.2
    """Time between checks for objects that another controller has yet to create.

    It is also the time before the first retry of a release.
    """
    look_first_s: float = 1.0
    look_most_s: float = 300.0
    """Longest time between two checks of whether Kueue has admitted a job; `look_first_s` is the first.

    The job's own events report an admission, but not that Kueue has given the job up.
    """
    look_least_s: float = 0.1
    """Shortest time until such a check if a job may soon be requeued."""
    requeue_again_s: float = 60.0
    """Time until the next check of whether there is another flavor for a job, or whether the job can be changed."""
    conflict_first_s: float = 0.5
    conflict_most_s: float = 32.0
    """Longest wait after a write that failed with a conflict. The wait doubles with each consecutive conflict."""
    unserved_s: float = 5.0
    """Time until an object with a missing CRD is written again."""
    tell_after_s: float = 10.0
    """Time that a job waits before a notice says why."""
    tell_again_s: float = 2.0
    tell_again_most_s: float = 60.0
    """Longest time between two checks for advice before a notice is written; `tell_again_s` is the first.

    Advice for a job that has waited long may be ready soon. The time doubles with each check, so that ten thousand
    waiting jobs cost little.
    """
    first_list_s: float = 30.0
    """Seconds without a new object after which a first list counts as complete, whatever the API server counts."""
    first_list_uncounted_s: float = 10.0
    """Like `first_list_s`, if the API server gives no count, as for nodes that a selector selects."""
    review_holds_s: float = 60.0
    """Time for which the result of a TokenReview is cached."""
