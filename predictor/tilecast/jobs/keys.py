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
APPLIED = f"{GROUP}/applied"
"""Annotation that says that mode Initial is over: "True" if the node choice was written, else "False"."""
ADVISOR = f"{GROUP}/advisor"
"""Our name in lists of gates and of managers."""
ADMISSION_GATES = "kueue.x-k8s.io/admission-gated-by"
QUEUE = "kueue.x-k8s.io/queue-name"

CONFIG_MAP = "configmap:"
"""`tilecast.dev/model: configmap:NAME/KEY` names a config.json or a graph in a ConfigMap."""

AS_SERVED = "give the job as the API server has it"
"""The remedy where a job is not shaped like an object."""
