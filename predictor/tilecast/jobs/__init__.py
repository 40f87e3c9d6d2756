"""Jobs of existing kinds: the properties that advice reads from them, and the fields that advice changes in them.

`interface` defines the properties of a kind of job, and each module of `kinds` describes one kind. `kueue` reads the
queues that jobs wait in, `candidates` finds the pools that a job may use, and `priorities` finds its order of
admission. `changes` and `commands` compute the fields to write. All functions are pure and work on dictionaries. Read
`interface` first.
"""

from tilecast.jobs.annotations import locate_in_annotations, name_annotation, read_annotations, read_mode, read_weight
from tilecast.jobs.changes import compute_changes
from tilecast.jobs.claims import find_claim_objects, resolve_claims
from tilecast.jobs.interface import (
    Job,
    Placement,
    Pods,
    add_tolerations,
    choose_selector,
    chosen_labels,
    remove_node_choice,
)
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
from tilecast.jobs.reading import read_job, read_without_pods, require_gpus

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
    "add_tolerations",
    "choose_selector",
    "chosen_labels",
    "compute_changes",
    "find_claim_objects",
    "is_job",
    "locate_in_annotations",
    "name_annotation",
    "read_annotations",
    "read_job",
    "read_mode",
    "read_weight",
    "read_without_pods",
    "remove_node_choice",
    "require_gpus",
    "resolve_claims",
    "runtime_of",
]  # fmt: skip
