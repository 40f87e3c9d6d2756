"""Jobs of existing kinds: the properties that advice reads from them, and the fields that advice changes in them.

`interface` defines the properties of a kind of job, and each module of `kinds` describes one kind. `kueue` reads the
queues that jobs wait in, `candidates` finds the pools that a job may use, and `priorities` finds its order of
admission. `changes` and `commands` compute the fields to write. All functions are pure and work on dictionaries. Read
`interface` first.
"""

from tilecast.jobs.annotations import described, in_annotations, in_words, mode_of, weight
from tilecast.jobs.changes import changes
from tilecast.jobs.claims import objects_of, resolved
from tilecast.jobs.interface import Job, Placement, Pods, chosen_labels, selector, tolerated, unplaced
from tilecast.jobs.keys import (
    ADMISSION_GATES,
    ADVISOR,
    APPLIED,
    CHOSEN_LABELS,
    ENABLED,
    HOLD_QUEUE,
    IGNORE,
    MODE,
    MODEL,
    NEXT_QUEUE,
    PRIORITY_CLASS,
    QUEUE,
    TRAINING,
    WEIGHT,
)
from tilecast.jobs.kinds import JOB_KINDS, is_job, runtime_of
from tilecast.jobs.priorities import Priorities, PriorityClass
from tilecast.jobs.reading import bare, read, require_gpus

__all__ = [
    "ADMISSION_GATES",
    "ADVISOR",
    "APPLIED",
    "CHOSEN_LABELS",
    "ENABLED",
    "HOLD_QUEUE",
    "IGNORE",
    "JOB_KINDS",
    "MODE",
    "MODEL",
    "NEXT_QUEUE",
    "PRIORITY_CLASS",
    "QUEUE",
    "TRAINING",
    "WEIGHT",
    "Job",
    "Placement",
    "Pods",
    "Priorities",
    "PriorityClass",
    "bare",
    "changes",
    "chosen_labels",
    "described",
    "in_annotations",
    "in_words",
    "is_job",
    "mode_of",
    "objects_of",
    "read",
    "require_gpus",
    "resolved",
    "runtime_of",
    "selector",
    "tolerated",
    "unplaced",
    "weight",
]  # fmt: skip
