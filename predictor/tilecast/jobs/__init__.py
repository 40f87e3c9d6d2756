"""Jobs of existing kinds: the properties that advice reads from them, and the fields that advice changes in them.

`interface` defines the properties of a kind of job, and each module of `kinds` describes one kind. `kueue` reads the
queues that jobs wait in. `candidates` finds the pools that a job may use. `priorities` finds a job's priority.
`changes` and `commands` compute the fields to write. All functions are pure and work on dictionaries. Read the module
`interface` first.
"""

from tilecast.jobs.annotations import (
    move_error_to_annotation,
    move_message_to_annotation,
    read_mode,
    read_training_spec,
    read_weight,
)
from tilecast.jobs.changes import compute_changes
from tilecast.jobs.claims import find_claim_objects, resolve_claims
from tilecast.jobs.interface import (
    Job,
    Placement,
    Pods,
    add_tolerations,
    list_labels_to_record,
    merge_node_selector,
    remove_advised_selector,
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
    READING,
    RUN_ESTIMATE,
    RUN_LIMIT,
    RUN_LIMIT_FACTOR,
    RUN_LIMIT_LABEL,
    RUN_RANGE,
    START_ESTIMATE,
    START_RANGE,
    TRAINING,
    WEIGHT,
)
from tilecast.jobs.kinds import JOB_KINDS, find_training_runtime, is_job
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
    "READING",
    "RUN_ESTIMATE",
    "RUN_LIMIT",
    "RUN_LIMIT_FACTOR",
    "RUN_LIMIT_LABEL",
    "RUN_RANGE",
    "START_ESTIMATE",
    "START_RANGE",
    "TRAINING",
    "WEIGHT",
    "Job",
    "Placement",
    "Pods",
    "Priorities",
    "PriorityClass",
    "add_tolerations",
    "compute_changes",
    "find_claim_objects",
    "find_training_runtime",
    "is_job",
    "list_labels_to_record",
    "merge_node_selector",
    "move_error_to_annotation",
    "move_message_to_annotation",
    "read_job",
    "read_mode",
    "read_training_spec",
    "read_weight",
    "read_without_pods",
    "remove_advised_selector",
    "require_gpus",
    "resolve_claims",
]  # fmt: skip
