"""The operator advises jobs without annotations whose command says what they train."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from job_store import JOBS, PLACING, JobStore, serving, until
from test_pod_launches import AXOLOTL, TRAINER
from tilecast.jobs import APPLIED, MODEL, READING
from tilecast_operator.objects.documents import PARALLELISM, POOL

CONFIG_MAP = "/api/v1/namespaces/default/configmaps/train"


def unannotated(store: JobStore, command: str, **pod: Any) -> dict[str, Any]:
    """Store a job that is not annotated with a model and its training, and return it."""
    body = store.job(model=None, training=None)
    template = body["spec"]["template"]["spec"]
    template["containers"][0] |= {"command": ["bash", "-c", command], "args": [], **pod.pop("container", {})}
    template |= pod
    template["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 8}}
    body["spec"] |= {"parallelism": 1, "completions": 1}
    return store.put(f"{JOBS}/a", body)


MOUNT = {
    "container": {"volumeMounts": [{"name": "v", "mountPath": "/etc/train"}]},
    "volumes": [{"name": "v", "configMap": {"name": "train"}}],
}


async def test_a_job_needs_no_annotation_where_its_command_says_it() -> None:
    store = JobStore()
    async with serving(store) as running:
        running.cache.put_object(unannotated(store, f"torchrun --nproc-per-node 8 {TRAINER}"))
        await until(lambda: store.annotations().get(READING), "the job to be annotated")
        seen = store.annotations()
        assert MODEL not in seen and seen[POOL] and "zeroStage" in seen[PARALLELISM]
        said = json.loads(seen[READING])
        assert (said["model"], said["gpus"], said["confidence"]) == ("meta-llama/Llama-3.1-8B", 8, "high")
        assert said["from"] == ["spec.template.spec.containers[0]"]


async def test_a_job_whose_command_is_not_known_says_why() -> None:
    store = JobStore()
    async with serving(store) as running:
        running.cache.put_object(unannotated(store, "torchrun --nproc-per-node 8 mnist.py"))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        await until(lambda: store.events, "an Event")
        (event, *_) = store.events_seen()
        assert "no training script that is known" in event[1]
        assert READING not in store.annotations()


async def test_a_model_of_the_hub_is_answered_with_what_to_do() -> None:
    store = JobStore()
    async with serving(store) as running:
        command = f"torchrun --nproc-per-node 8 {TRAINER}".replace("meta-llama/Llama-3.1-8B", "me/My-9B")
        running.cache.put_object(unannotated(store, command))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        await until(lambda: store.events, "an Event")
        message = store.events_seen()[0][1]
        assert "me/My-9B is no preset, and the operator does not ask the Hugging Face Hub" in message
        assert "annotate tilecast.dev/model: configmap:NAME/config.json" in message


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.slow
async def test_config_maps_are_read_only_where_the_settings_allow_it(allowed: bool) -> None:
    store = JobStore()
    store.put(CONFIG_MAP, {"kind": "ConfigMap", "metadata": {"name": "train"}, "data": {"run.yaml": LORA}})
    asked = list[str]()
    get = store.get

    async def record(path: str, query: Any = None) -> dict[str, Any]:
        asked.append(path)
        return await get(path, query)

    store.get = record  # type: ignore[method-assign]
    async with serving(store, replace(PLACING, read_pod_config_maps=allowed)) as running:
        running.cache.put_object(unannotated(store, "axolotl train /etc/train/run.yaml", **MOUNT))
        await until(lambda: store.annotations().get(APPLIED), "the job to be let go")
        if allowed:
            await until(lambda: store.annotations().get(READING), "the job to be annotated")
            assert "ConfigMap train, key run.yaml" in json.loads(store.annotations()[READING])["from"]
        else:
            await until(lambda: store.events, "an Event")
            message = store.events_seen()[0][1]
            assert "lies in ConfigMap train" in message and "jobs.readConfigMaps" in message
        assert (CONFIG_MAP in asked) == allowed


LORA = f"{AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_linear: true\ngradient_checkpointing: true\n"
