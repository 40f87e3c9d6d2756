"""Hostile objects for an API server: deep, large, many, odd and wrong ones, for every field that a tenant may write."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

TENANT, OTHERS = "hostile", tuple(f"team-{number}" for number in range(10))
TRAINING = {"sequenceLength": 512, "globalBatchSize": 64, "precision": "fp16"}
JOBS = "/apis/tilecast.dev/v1alpha1/namespaces/{}/trainingjobs"
BATCH = "/apis/batch/v1/namespaces/{}/jobs"
MAPS = "/api/v1/namespaces/{}/configmaps"


def _nested(levels: int) -> str:
    return "[" * levels + "1" + "]" * levels


def texts(rng: random.Random) -> Iterator[str]:
    """Yield hostile JSON texts without end, of several kinds at random."""
    kinds: tuple[Callable[[], str], ...] = (
        lambda: _nested(rng.choice((65, 999, 9_990, 30_000, 59_500, 90_000))),
        lambda: '{"a":' * rng.choice((65, 5_000, 20_000)) + "1" + "}" * rng.choice((65, 5_000, 20_000)),
        lambda: json.dumps(["x"] * rng.choice((1_000, 20_000))),
        lambda: json.dumps("x" * rng.choice((1_000, 100_000))),
        lambda: rng.choice(("1e400", "NaN", "-Infinity", "9" * 5_000, "-1", "0", "1e308", "2.5", "true", "null")),
        lambda: rng.choice(('"\\ud800"', '"\u202e\u0000"', '"\\u0000"', '"💥"', '""', '"x', "{", "[]", "{}")),
    )
    while True:
        yield rng.choice(kinds)()


def _training_job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"training": TRAINING, **spec},
    }


def annotated_job(name: str, **annotations: str) -> dict[str, Any]:
    """Return a suspended Job that asks for advice; keys of annotations are without `tilecast.dev/`."""
    resources = {"limits": {"nvidia.com/gpu": 1}}
    pod = {"restartPolicy": "Never", "containers": [{"name": "train", "image": "x", "resources": resources}]}
    marks = {f"tilecast.dev/{key}": text for key, text in annotations.items()}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"tilecast.dev/enabled": "true"}, "annotations": marks},
        "spec": {"suspend": True, "template": {"spec": pod}},
    }


def _heavy(rng: random.Random) -> dict[str, Any]:
    """Return a config of few bytes that asks for a long search."""
    depth = rng.choice((400, 1_000))
    return {
        "model_type": rng.choice(("resnet", "convnext", "segformer")),
        "architectures": ["ResNetForImageClassification"],
        "depths": [depth] * 4,
        "hidden_sizes": [64] * 4,
        "embedding_size": 64,
        "layer_type": "bottleneck",
    }


def hostile(count: int, seed: int) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Yield `count` groups of objects, each object a path and a document.

    Objects of one group belong together.
    """
    rng = random.Random(seed)  # noqa: S311
    text = texts(rng)
    for number in range(count):
        name, value = f"hostile-{number}", next(text)
        config = json.dumps({"model_type": "gpt2", "hidden_size": "HERE"}).replace('"HERE"', value)
        reference = {"configMapKeyRef": {"name": name, "key": "config.json"}}
        match number % 8:
            case 0:
                yield [(BATCH, annotated_job(name, model="gpt2", training=f'{{"globalBatchSize": {value}}}'))]
            case 1:
                yield [(BATCH, annotated_job(name, model=value, training=json.dumps(TRAINING), mode="Initial"))]
            case 2:
                yield [(BATCH, annotated_job(name, model="gpt2", training=json.dumps(TRAINING), constraints=value))]
            case 3:
                config_map = {"kind": "ConfigMap", "metadata": {"name": name}, "data": {"config.json": config}}
                yield [(MAPS, config_map), (JOBS, _training_job(name, {"model": {"huggingFace": reference}}))]
            case 4:
                yield [(JOBS, _training_job(name, {"model": {"huggingFace": {"config": _heavy(rng)}}}))]
            case 5:
                wide = {"globalBatchSizeRange": {"min": 1, "max": 16_777_216}, "allowedPrecisions": ["fp32", "fp16"]}
                training = {key: value for key, value in TRAINING.items() if key == "sequenceLength"}
                yield [(JOBS, _training_job(name, {"model": {"preset": "gpt2-xl"}, "training": training | wide}))]
            case 6:
                yield [(JOBS, _training_job(name, {"model": {"preset": "x" * rng.choice((1, 300, 100_000))}}))]
            case 7:
                inline = {"model_type": "gpt2", "n_layer": rng.choice((10**9, -1, 0, 10**300)), "n_embd": [[["x"]]]}
                yield [(JOBS, _training_job(name, {"model": {"huggingFace": {"config": inline}}}))]


def honest(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield namespace and TrainingJob of honest jobs, alternating between namespaces; few of the jobs are equal."""
    for number in range(count):
        training = {**TRAINING, "globalBatchSize": 32 * (1 + number // 4)}
        preset = ("gpt2", "gpt2-medium", "gpt2-large", "opt-1.3b")[number % 4]
        job = _training_job(f"honest-{number}", {"model": {"preset": preset}, "training": training})
        yield OTHERS[number % len(OTHERS)], job
