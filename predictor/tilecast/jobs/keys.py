"""Labels and annotations that Tilecast and Kueue read on a job."""

from __future__ import annotations

from tilecast.api.base import GROUP

ENABLED = f"{GROUP}/enabled"
"""Label of a job or a namespace that requests advice."""
MODEL = f"{GROUP}/model"
TRAINING = f"{GROUP}/training"
CONSTRAINTS = f"{GROUP}/constraints"
OBJECTIVE = f"{GROUP}/objective"
MODE = f"{GROUP}/mode"
IGNORE = f"{GROUP}/ignore"
WEIGHT = f"{GROUP}/weight"
"""Annotation with the weight of the job's completion time in `tilecast queue`. The default is 1."""
APPLIED = f"{GROUP}/applied"
"""Annotation with the outcome for a job in mode Initial."""
READING = f"{GROUP}/read-from-command"
"""Annotation with what advice read from the job's command: JSON with model, plan, place and confidence."""
NEXT_QUEUE = f"{GROUP}/queue"
"""Annotation with the LocalQueue to which a job moves once it is placed. Until then it waits in a holding queue."""
CHOSEN_LABELS = f"{GROUP}/chosen-labels"
"""Annotation with the node labels that advice added to the job, separated by commas, if nothing else marks them."""
START_ESTIMATE = f"{GROUP}/start-estimate"
"""Annotation of a Kueue Workload with the planned start of its job. Nothing enforces it."""
START_RANGE = f"{GROUP}/start-estimate-range"
RUN_ESTIMATE = f"{GROUP}/run-estimate-seconds"
"""Annotation of a Kueue Workload with the forecast run time. Nothing enforces it."""
RUN_RANGE = f"{GROUP}/run-estimate-range-seconds"
ADVISOR = f"{GROUP}/advisor"
"""Tilecast's name in lists of gates and of managers."""
ADMISSION_GATES = "kueue.x-k8s.io/admission-gated-by"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
HOLD_QUEUE = "tilecast-hold"
"""LocalQueue in which the chart's admission policy makes jobs wait."""

BATCH_SCHEDULERS = {"kai-scheduler": "kai.scheduler/queue", "volcano": "scheduling.volcano.sh/queue-name"}
"""Labels or annotations with a job's queue, by scheduler."""

CONFIG_MAP = "configmap:"
"""Prefix of a model that is in a ConfigMap: `tilecast.dev/model: configmap:NAME/KEY` names a config.json or a graph."""

AS_SERVED = "give the job as the API server has it"
"""Remedy for a job document that does not have the form of an API object."""
