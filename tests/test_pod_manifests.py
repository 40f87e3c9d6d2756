"""Manifests as people write them: each is read as expected, or refused with the expected reason.

The annotation `example.com/expect` of each job says model, batch, precision and plan, or the reason.
`bench/examples.py` holds the manifests against the CRDs.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tilecast.manifests import find_training_runtime, is_readable_job, read_manifest
from tilecast.spec import SpecError

FOLDER = Path(__file__).parent / "pod_manifests"
OBJECTS = {
    file.stem: [item for item in yaml.safe_load_all(file.read_text()) if item] for file in sorted(FOLDER.glob("*.yaml"))
}
JOBS = {
    f"{name}-{item['metadata']['name']}": (name, item)
    for name, items in OBJECTS.items()
    for item in items
    if is_readable_job(item)
}


@pytest.mark.parametrize(("file", "job"), JOBS.values(), ids=JOBS)
def test_a_manifest_is_read_as_expected_or_refused(file: str, job: dict[str, Any]) -> None:
    beside = {(item["kind"], item["metadata"]["name"]): item for item in OBJECTS[file]}
    config_maps = {name: item for (kind, name), item in beside.items() if kind == "ConfigMap"}
    runtime = beside.get(find_training_runtime(job) or ("", ""))
    expected = job["metadata"]["annotations"]["example.com/expect"]
    if expected.startswith("refused: "):
        with pytest.raises(SpecError, match=expected.removeprefix("refused: ")):
            read_manifest(job, runtime, config_maps)
        return
    read = read_manifest(job, runtime, config_maps)
    model = (read.model or {}).get("preset")
    training = read.training
    assert f"{model} {training['globalBatchSize']} {training['precision']} {read.launch.plan_text()}" == expected


def test_each_kind_has_several_manifests() -> None:
    counts = Counter(item["kind"] for _, item in JOBS.values())
    assert len(JOBS) >= 30
    assert all(counts[kind] >= 8 for kind in ("MPIJob", "RayJob", "Job", "TrainJob"))
