"""Labels and annotations that Tilecast and Kueue read on a job."""

from __future__ import annotations

from tilecast.api.base import GROUP

ENABLED = f"{GROUP}/enabled"
"""Label of a job or a namespace that asks for advice."""
MODEL = f"{GROUP}/model"
TRAINING = f"{GROUP}/training"
CONSTRAINTS = f"{GROUP}/constraints"
OBJECTIVE = f"{GROUP}/objective"
MODE = f"{GROUP}/mode"
IGNORE = f"{GROUP}/ignore"
WEIGHT = f"{GROUP}/weight"
"""Annotation: how much the job's completion counts in `tilecast queue`; 1 if absent."""
APPLIED = f"{GROUP}/applied"
"""Annotation that says what became of a job in mode Initial."""
NEXT_QUEUE = f"{GROUP}/queue"
"""Annotation with the LocalQueue that a job moves to once it is placed; until then it waits in one that is held."""
CHOSEN_LABELS = f"{GROUP}/chosen-labels"
"""Annotation with names of node labels, with commas between: those of a choice that nothing else tells from what the
author of the job wrote, should it be taken out again."""
ADVISOR = f"{GROUP}/advisor"
"""Our name in lists of gates and of managers."""
ADMISSION_GATES = "kueue.x-k8s.io/admission-gated-by"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
HOLD_QUEUE = "tilecast-hold"
"""The LocalQueue that the chart's policy has jobs wait in."""

BATCH_SCHEDULERS = {"kai-scheduler": "kai.scheduler/queue", "volcano": "scheduling.volcano.sh/queue-name"}
"""Schedulers with queues of their own, and the label or annotation that names the queue of a job."""

CONFIG_MAP = "configmap:"
"""`tilecast.dev/model: configmap:NAME/KEY` names a config.json or a graph in a ConfigMap."""

AS_SERVED = "give the job as the API server has it"
"""The remedy where a job is not shaped like an object."""
