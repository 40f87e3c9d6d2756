"""Names of the operator's annotations and field manager, and the TrainingJob document of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from tilecast.api import training_job
from tilecast.api.base import API_VERSION, GROUP, StatusModel
from tilecast.jobs import WEIGHT

COMPONENT = f"{GROUP}/advisor"
FIELD_MANAGER = "tilecast-advisor"

STARTED = f"{GROUP}/started"
OBSERVED = f"{GROUP}/observed-step-seconds"
INPUT_KEYS = (STARTED, OBSERVED, WEIGHT)
"""Annotations that the operator reads. Users, and the programs that start their jobs, write them."""


class AdviceAnnotations(StatusModel):
    """Annotations of an advised job."""

    node_type: str = Field(alias="tilecast.dev/recommended-node-type")
    pool: str = Field(alias="tilecast.dev/recommended-pool")
    node_selector: str = Field(alias="tilecast.dev/recommended-node-selector")
    gpus: str = Field(alias="tilecast.dev/recommended-gpus")
    parallelism: str = Field(alias="tilecast.dev/recommended-parallelism")
    step_seconds: str = Field(alias="tilecast.dev/predicted-step-seconds")
    confidence: str = Field(alias="tilecast.dev/prediction-confidence")
    advice_hash: str = Field(alias="tilecast.dev/advice-hash", max_length=63)


ADVICE_KEYS = tuple(str(field.alias) for field in AdviceAnnotations.model_fields.values())
"""Every annotation that the operator writes as advice."""
NODE_TYPE, POOL, NODE_SELECTOR, GPUS, PARALLELISM, STEP_SECONDS, CONFIDENCE, HASH = ADVICE_KEYS


LEASE_ADDRESS = f"{GROUP}/address"
"""Annotation of the operator's Lease with the URL at which its holder accepts reports."""


def make_training_job(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a TrainingJob with a name and a spec."""
    return {"apiVersion": API_VERSION, "kind": training_job.KIND, "metadata": {"name": name}, "spec": dict(spec)}
