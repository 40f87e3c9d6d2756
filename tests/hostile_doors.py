"""Give hostile texts to every reader of a process with the operator's own settings, in its main thread and in another.

Each pair of text and reader ("door") is printed before it is tried, so that the output shows at which the process dies.
Run by `test_untrusted.py`:

    python hostile_doors.py fast|long
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from tilecast import jobs, untrusted
from tilecast.api import calibration, documents, gpu_pool, pool_learning, stored_model, training_job
from tilecast.jobs.keys import CONSTRAINTS, TRAINING
from tilecast.spec import SpecError
from tilecast_operator import main, report_guard
from tilecast_operator.kube import kopf_internals
from tilecast_operator.objects.client import parse
from tilecast_operator.objects.documents import make_training_job
from tilecast_operator.objects.tables import Cache
from tilecast_operator.objects.view import encode_canonical
from tilecast_operator.observed import reports
from tilecast_operator.selector import LabelSelector

JOB = {"sequenceLength": 128, "globalBatchSize": 8}
HEAD = (
    '{"type":"ADDED","object":{"apiVersion":"%s","kind":"%s","metadata":{"name":"a","namespace":"b","uid":"c"},"spec":'
)


def _annotated(key: str) -> Callable[[str], object]:
    def read(text: str) -> object:
        notes = {jobs.MODEL: "gpt2", TRAINING: json.dumps(JOB), key: text}
        document = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "a", "namespace": "b", "uid": "c", "annotations": notes},
            "spec": {
                "template": {"spec": {"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}
            },
        }
        cache = Cache()
        cache.put_object(document)
        (seen,) = cache.jobs.values()
        spec = jobs.read_training_spec(jobs.read_job(seen).annotations)
        return training_job.parse_training_job(make_training_job("a", spec))

    return read


def _stored(model: dict[str, Any], key: str) -> Callable[[str], object]:
    def read(text: str) -> object:
        spec = training_job.parse_training_job(
            training_job.training_job_document("a", {"model": model, "training": JOB})
        )
        reference = training_job.find_model_reference(spec)
        assert reference is not None
        parts = {"data": {key: text}, "binaryData": {key: base64.b64encode(text.encode("utf-8", "replace")).decode()}}
        contents = [stored_model.config_map_content(reference, {part: value}) for part, value in parts.items()]
        return [training_job.to_request("a", spec, content) for content in contents]

    return read


def _watched(api_version: str, kind: str, spec: str) -> Callable[[str], object]:
    """Return a function that passes a text through kopf's watch, as part of an object, and then to the cache."""

    async def watch(**_: Any) -> AsyncIterator[Any]:
        yield event

    async def events() -> list[Any]:
        handed_on = kopf_internals.watch_forever(
            watch, object(), kopf_internals.FAILURES, 60.0, untrusted.empty_containers_below
        )
        return [one async for one in handed_on(resource=None)]

    def read(text: str) -> object:
        nonlocal event
        try:
            event = json.loads(HEAD % (api_version, kind) + spec.replace("TEXT", text) + "}}")
        except RecursionError:
            raise SpecError("watch", "is deeper than the API server stores", "") from None
        cache, seen = Cache(), []
        for one in asyncio.run(events()):
            cache.put_object(one["object"])
            seen.append(repr(one) + str(encode_canonical(one)))
        return [training_job.parse_training_job(view.document) for view in cache.training_jobs.values()]

    event: dict[str, Any] = {}
    return read


def _refused(read: Callable[[str], object]) -> Callable[[str], object]:
    def attempt(text: str) -> object:
        try:
            return read(text)
        except reports.RefusedReport as refused:
            raise SpecError("report", str(refused), "") from None

    return attempt


def _token(text: str) -> object:
    payload = base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode().rstrip("=")
    return report_guard.require_token(f"a.{payload}.c", "b", time.time())


def _answered(text: str) -> object:
    try:
        return repr(parse(text))
    except RecursionError:
        raise SpecError("answer", "is deeper than the API server stores", "") from None


def _pool(text: str) -> object:
    spec = gpu_pool.GPUPoolSpec.model_validate({"gpu": {"name": "t4"}, "gpusPerNode": 1, "maxNodes": 1})
    metadata = {"name": "a", "labels": {gpu_pool.DISCOVERED: "true"}, "annotations": {gpu_pool.DISCOVERY: text}}
    return gpu_pool.read_discovery({"metadata": metadata}, spec)


CONFIG = {"huggingFace": {"configMapKeyRef": {"name": "a", "key": "config.json"}}}
GRAPH = {"graphRef": {"configMapKeyRef": {"name": "a", "key": "graph.json"}}}
INLINE = '{"model":{"huggingFace":{"config":TEXT}},"training":{"sequenceLength":128,"globalBatchSize":8}}'
DOORS: dict[str, Callable[[str], object]] = {
    "annotation training": _annotated(TRAINING),
    "annotation constraints": _annotated(CONSTRAINTS),
    "annotation model": _annotated(jobs.MODEL),
    "ConfigMap config": _stored(CONFIG, "config.json"),
    "ConfigMap graph": _stored(GRAPH, "graph.json"),
    "TrainingJob config": _watched("tilecast.dev/v1alpha1", "TrainingJob", INLINE),
    "TrainingJob spec": _watched("tilecast.dev/v1alpha1", "TrainingJob", "TEXT"),
    "Job spec": _watched("batch/v1", "Job", '{"template":{"spec":{"containers":[]}},"other":TEXT}'),
    "PoolLearning": _watched("tilecast.dev/v1alpha1", "PoolLearning", '{"runs":TEXT}'),
    "QueueAdvice": _watched("tilecast.dev/v1alpha1", "QueueAdvice", "TEXT"),
    "answer of the API server": _answered,
    "report": _refused(lambda text: reports.parse_body_report(text.encode("utf-8", "replace"), None)),
    "token": _refused(_token),
    "annotation of a pool": _pool,
    "selector": lambda text: LabelSelector.from_json(text, "selector"),
    "file": lambda text: documents.load_documents(text, "file"),
    "file of runs": lambda text: [
        pool_learning.read_learnt_runs("a", one) for one in documents.load_documents(text, "file")
    ],
    "calibration": lambda text: calibration.parse_calibration(text, "file"),
}


def _deep(levels: int, opening: str, closing: str) -> str:
    return opening * levels + "1" + closing * levels


def values(size: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each hostile value.

    Most of them are also tried as the value of a field that is read.
    """
    levels = {"fast": (65, 10_050), "long": (64, 65, 9_990, 58_000, 200_000)}
    for count in levels[size]:
        yield f"{count} lists", _deep(count, "[", "]")
        yield f"{count} mappings", _deep(count, '{"globalBatchSize":', "}")
        yield f"{count} lists left open", "[" * count
    bare = [
        "1e400",
        "NaN",
        "-Infinity",
        "9" * 5000,
        "null",
        "true",
        '""',
        '"\\ud800"',
        '"\u202e\x7f"',
        "[]",
        "{}",
        '"x',
    ]
    yield from ((text[:20], text) for text in bare)
    yield "many values", json.dumps(["x"] * (1000 if size == "fast" else 200_000))
    yield "a long text", json.dumps("x" * 2**20)
    yield "a long text in quotes that are escaped", json.dumps('["' * 2**18)
    yield "an alias inside of what it names", "a: &a [*a]"
    aliases = "".join(f"l{place}: &l{place} [{', '.join([f'*l{place - 1}'] * 9)}]\n" for place in range(1, 12))
    yield "aliases of aliases", f"l0: &l0 [x]\n{aliases}"


FIELDS = ('{"globalBatchSize":TEXT}', '{"model_type":"gpt2","n_embd":TEXT}', '{"stepSeconds":TEXT}')


def attempt_all(size: str, where: str) -> None:
    """Try every value at every door."""
    for name, text in values(size):
        for door, read in DOORS.items():
            for whole in (text, *(field.replace("TEXT", text) for field in FIELDS)):
                sys.stdout.write(f"{where}: {door}: {name}: {whole[:24]!r}\n")
                sys.stdout.flush()
                try:
                    read(whole)
                except SpecError as error:
                    assert len(str(error)) < 1000 and "\n" not in str(error), str(error)[:2000]
                except ValueError as error:
                    # Invalid JSON reaches no handler: kopf and the client parse it before.
                    assert isinstance(error, json.JSONDecodeError) or "digits" in str(error), error


def within_thread(size: str) -> bool:
    """Try every value in a thread as the operator starts them, and return whether the thread finished."""
    done = []

    def run() -> None:
        attempt_all(size, "thread")
        done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return bool(done)


if __name__ == "__main__":
    assert main.CHUNK
    attempt_all(sys.argv[1], "main")
    sys.exit(0 if within_thread(sys.argv[1]) else 1)
