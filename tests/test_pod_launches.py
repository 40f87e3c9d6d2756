"""What the pods of a job say that it trains: their command, environment and ConfigMaps."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.manifests import JobReading, is_readable_job, list_config_maps, read_manifest
from tilecast.public.advising import AdviceInputs, compute_advice
from tilecast.spec import SpecError

TRAINER = (
    "train.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 4 --bf16 True --model_max_length 4096 --fsdp full_shard "
    "--gradient_checkpointing True"
)
"""A training script of Transformers with its options."""


def pod(*words: str, gpus: int = 8, **more: Any) -> dict[str, Any]:
    """Return a pod template with one container that runs the words."""
    resources = {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}
    return {"spec": {"containers": [{"name": "main", "command": list(words), "resources": resources, **more}]}}


def batch_job(template: dict[str, Any], pods: int = 1) -> dict[str, Any]:
    """Return a batch Job."""
    spec = {"parallelism": pods, "completions": pods, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": spec}


def pytorch_job(template: dict[str, Any], workers: int = 1, **more: Any) -> dict[str, Any]:
    """Return a PyTorchJob of a master and workers."""
    replicas = {"Master": {"replicas": 1, "template": template}}
    if workers:
        replicas["Worker"] = {"replicas": workers, "template": template}
    spec = {"pytorchReplicaSpecs": replicas, **more}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "llama"}, "spec": spec}


def bash(text: str, gpus: int = 8, **more: Any) -> dict[str, Any]:
    """Return a pod template that runs a shell command."""
    return pod("bash", "-c", text, gpus=gpus, **more)


def read_facts(reading: JobReading) -> tuple[object, ...]:
    """Return model, batch, precision, plan and GPUs of a reading."""
    training = reading.training
    return reading.model, training["globalBatchSize"], training["precision"], reading.launch.plan_text(), reading.gpus


LLAMA = {"preset": "llama-3.1-8b"}


def test_a_pytorch_job_says_model_batch_precision_and_plan() -> None:
    read = read_manifest(pytorch_job(bash(f"torchrun {TRAINER}"), workers=3, nprocPerNode="8"))
    assert read_facts(read) == (LLAMA, 2 * 4 * 32, "bf16", "dp=32,zero=3,mb=2,ac=full", 32)
    assert (read.pods, read.gpus_per_pod, read.confidence) == (4, 8, "high")
    assert read.where == "spec.pytorchReplicaSpecs.Master.template.spec.containers[0]"


@pytest.mark.parametrize("way", ["$(BATCH)", "${BATCH}", "$BATCH"])
def test_variables_of_the_container_are_resolved(way: str) -> None:
    command = f"torchrun --nproc-per-node 8 {TRAINER.replace('_size 2', f'_size {way}')}"
    read = read_manifest(batch_job(bash(command, env=[{"name": "BATCH", "value": "4"}])))
    assert read.launch.plan.micro_batch == 4


def test_a_variable_of_a_secret_is_not_guessed() -> None:
    command = f"torchrun --nproc-per-node 8 {TRAINER.replace('_size 2', '_size $(BATCH)')}"
    secret = {"name": "BATCH", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    with pytest.raises(SpecError, match="value is that of BATCH, which is not literal"):
        read_manifest(batch_job(bash(command, env=[secret])))


def test_values_of_a_config_map_are_variables() -> None:
    command = f"torchrun --nproc-per-node $N {TRAINER}"
    config_map = {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"N": "8"}}
    job = batch_job(bash(command, envFrom=[{"configMapRef": {"name": "c"}}]))
    assert list_config_maps(job) == {"c"}
    assert read_manifest(job, None, {"c": config_map}).gpus == 8


def mounted(command: str, **volume: Any) -> dict[str, Any]:
    """Return a batch Job whose pod mounts ConfigMap `c` at /etc/train."""
    template = bash(command, volumeMounts=[{"name": "v", "mountPath": "/etc/train"}])
    template["spec"]["volumes"] = [{"name": "v", "configMap": {"name": "c", **volume}}]
    return batch_job(template)


AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B
micro_batch_size: 2
gradient_accumulation_steps: 4
sequence_len: 4096
bf16: true
"""


def test_scripts_and_configurations_of_config_maps_are_read() -> None:
    data = {"run.sh": "cd /etc/train\nexec axolotl train /etc/train/run.yaml\n", "run.yaml": AXOLOTL}
    read = read_manifest(mounted("bash /etc/train/run.sh"), None, {"c": {"data": data}})
    assert read_facts(read) == (LLAMA, 64, "bf16", "dp=8,mb=2", 8)
    assert read.files == ("ConfigMap c, key run.sh", "ConfigMap c, key run.yaml")


def test_items_of_a_config_map_have_their_own_paths() -> None:
    job = mounted("axolotl train /etc/train/a/b.yaml", items=[{"key": "k", "path": "a/b.yaml"}])
    assert read_manifest(job, None, {"c": {"data": {"k": AXOLOTL}}}).launch.plan.micro_batch == 2


def test_a_config_map_that_is_not_given_is_named() -> None:
    with pytest.raises(SpecError, match="lies in ConfigMap c, which was not given; give ConfigMap c"):
        read_manifest(mounted("axolotl train /etc/train/run.yaml"))


def test_a_file_of_the_image_is_refused() -> None:
    with pytest.raises(SpecError, match="the image or a volume holds it"):
        read_manifest(batch_job(bash("axolotl train /workspace/run.yaml")))


def test_a_path_does_not_leave_the_mount() -> None:
    with pytest.raises(SpecError, match="the image or a volume holds it"):
        read_manifest(mounted("axolotl train /etc/train/../../etc/passwd.yaml"), None, {"c": {"data": {"x": "1"}}})


def test_a_config_map_may_hold_the_model() -> None:
    config = '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, ' + (
        '"intermediate_size": 128, "vocab_size": 100, "architectures": ["LlamaForCausalLM"]}'
    )
    command = f"torchrun --nproc-per-node 8 {TRAINER.replace('meta-llama/Llama-3.1-8B', '/etc/train')}"
    model = read_manifest(mounted(command), None, {"c": {"data": {"config.json": config}}}).model
    assert model is not None
    assert model["huggingFace"]["config"]["hidden_size"] == 64


def test_litgpt_starts_the_processes_of_its_devices() -> None:
    command = "pip install litgpt && litgpt finetune_lora meta-llama/Llama-3.1-8B --devices"
    read = read_manifest(batch_job(bash(f"{command} 8")))
    assert read_facts(read) == (LLAMA, 16, "bf16", "dp=8,zero=3,mb=1,ac=full", 8)
    assert read.training["loraRank"] == 8


REFUSED = {
    "LitGPT on one GPU": (batch_job(bash("litgpt finetune meta-llama/Llama-3.1-8B")), "give --devices 8"),
    "LitGPT in two pods": (
        batch_job(bash("litgpt finetune meta-llama/Llama-3.1-8B --devices=8"), 2),
        "give --num_nodes 2",
    ),
    "LitGPT by a file": (batch_job(bash("litgpt finetune --config a.yaml")), "states no --devices"),
    "no GPU": (batch_job(bash(f"torchrun --nproc-per-node 8 {TRAINER}", gpus=0)), "no pod asks for a GPU"),
    "no command": (batch_job(pod()), "has no command"),
    "another script": (batch_job(bash("torchrun --nproc-per-node 8 mnist.py")), "no training script that is known"),
    "nothing launched": (batch_job(bash("sleep infinity")), "holds no launch line"),
    "fewer processes": (batch_job(bash(f"torchrun --nproc-per-node 4 {TRAINER}")), "starts 4 processes"),
    "one process": (batch_job(bash(f"torchrun {TRAINER}")), "starts 1 processes"),
    "plain Python": (batch_job(bash(f"python {TRAINER}")), "one process in a pod of 8 GPUs"),
    "separate runs": (batch_job(bash(f"torchrun --nproc-per-node 8 {TRAINER}"), 2), "they would be separate runs"),
    "separate pods": (batch_job(bash(f"python {TRAINER}", gpus=1), 2), "a separate run in each of 2 pods"),
    "more nodes": (
        batch_job(bash(f"torchrun --nnodes 4 --nproc-per-node 8 {TRAINER}"), 2),
        "waits for 4 nodes, and there are 2 pods",
    ),
    "unknown path": (
        batch_job(bash(f"torchrun --nproc-per-node 8 {TRAINER.replace('meta-llama/Llama-3.1-8B', '/mnt/m')}")),
        "names the model by the path '/mnt/m'",
    ),
    "two launches": (
        batch_job(bash(f"torchrun --nproc-per-node 8 {TRAINER}\ntorchrun --nproc-per-node 8 {TRAINER} --bf16 False")),
        "launches 2 jobs",
    ),
    "cut off": (batch_job(bash(f"torchrun --nproc-per-node 8 {TRAINER} 'x")), "is not closed"),
    "binary": (batch_job(bash("torchrun \x00")), "is binary"),
    "a long line": (batch_job(bash("torchrun " + "x" * 2**20)), "longer than 1 MiB"),
    "world size as nodes": (
        pytorch_job(bash(f"torchrun --nnodes $WORLD_SIZE --nproc-per-node 8 {TRAINER}"), nprocPerNode="8"),
        "waits for 16 nodes, and there are 2 pods",
    ),
    "a number of pods": (batch_job(bash(f"torchrun {TRAINER}"), 2**40), "is no number of pods"),
    "accelerate without a number": (batch_job(bash(f"accelerate launch {TRAINER}"), 2), "names no --num_processes"),
}


@pytest.mark.parametrize(("job", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_said_is_refused_with_the_reason(job: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as error:
        read_manifest(job)
    assert "\n" not in str(error.value)


def test_different_commands_of_master_and_workers_are_refused() -> None:
    job = pytorch_job(bash(f"torchrun {TRAINER}"), nprocPerNode="8")
    worker = deepcopy(job["spec"]["pytorchReplicaSpecs"]["Master"])
    worker["template"] = bash(f"torchrun {TRAINER.replace('_size 2', '_size 4')}")
    job["spec"]["pytorchReplicaSpecs"]["Worker"] = worker
    with pytest.raises(SpecError, match="run different commands"):
        read_manifest(job)


def test_a_computed_number_of_nodes_is_that_of_the_pods_and_less_sure() -> None:
    command = f"torchrun --nnodes $(wc -l < /etc/hosts) --nproc-per-node 8 {TRAINER}"
    read = read_manifest(batch_job(bash(command), 2))
    assert (read.gpus, read.confidence) == (16, "medium")
    assert read.assumed == ("--nnodes is computed by the run: 2 nodes assumed.",)


def test_plain_processes_of_a_pytorch_job_find_each_other() -> None:
    read = read_manifest(pytorch_job(bash(f"python {TRAINER}", gpus=1), workers=3))
    assert read.launch.plan.data == 4


def test_an_annotation_is_a_short_json() -> None:
    text = read_manifest(pytorch_job(bash(f"torchrun {TRAINER}"), nprocPerNode="8")).format_annotation()
    assert '"plan":"dp=16,zero=3,mb=2,ac=full"' in text
    assert '"confidence":"high"' in text
    assert len(text) <= 1024


def test_other_documents_are_no_jobs() -> None:
    assert not is_readable_job({"apiVersion": "v1", "kind": "Job"})
    assert not is_readable_job({"apiVersion": "example.com/v1", "kind": "PyTorchJob"})
    assert not is_readable_job({"kind": None})


POOLS = PoolOptions(gpus="h100-sxm:32")


def advise_on(tmp_path: Path, *objects: dict[str, Any], **values: Any) -> Any:
    """Return the result of advice on a file of objects."""
    import yaml

    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    return compute_advice(AdviceInputs(JobOptions.from_values(str(path), values), POOLS))


def test_advice_needs_no_annotation_where_the_command_says_it(tmp_path: Path) -> None:
    result = advise_on(tmp_path, pytorch_job(bash(f"torchrun {TRAINER}"), workers=3, nprocPerNode="8"))
    baseline = result.advice.baseline
    assert (baseline.gpus, baseline.plan.zero_stage, baseline.plan.micro_batch) == (32, 3, 2)
    assert result.advice.request.workload.global_batch == 256
    assert any(note.startswith("Read as Transformers Trainer: dp=32") for note in result.advice.notes)


def test_annotations_take_precedence_over_the_command(tmp_path: Path) -> None:
    job = pytorch_job(bash(f"torchrun {TRAINER}"), workers=3, nprocPerNode="8")
    job["metadata"]["annotations"] = {
        "tilecast.dev/model": "qwen3-8b",
        "tilecast.dev/training": '{"globalBatchSize": 128}',
    }
    workload = advise_on(tmp_path, job).advice.request.workload
    assert (workload.model.name, workload.global_batch, workload.sequence_length) == ("qwen3-8b", 128, 4096)


def test_a_missing_annotation_says_why_the_command_does_not_help(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"tilecast.dev/model: is missing, and the command does not say it: spec\.temp"):
        advise_on(tmp_path, batch_job(bash("torchrun --nproc-per-node 8 mnist.py")))


def test_a_flag_of_a_bare_model_corrects_what_a_command_says(tmp_path: Path) -> None:
    job = pytorch_job(bash(f"torchrun {TRAINER}"), workers=3, nprocPerNode="8")
    assert advise_on(tmp_path, job, seq=2048).advice.request.workload.sequence_length == 2048


def test_a_file_of_several_jobs_is_for_scan(tmp_path: Path) -> None:
    job = batch_job(bash(f"torchrun --nproc-per-node 8 {TRAINER}"))
    with pytest.raises(SpecError, match=r"holds 2 jobs; .* by `tilecast scan`"):
        advise_on(tmp_path, job, pytorch_job(bash(f"torchrun {TRAINER}")))


SPECS: dict[str, Any] = {
    "no spec": None,
    "a list": [],
    "no template": {"template": None},
    "no containers": {"template": {"spec": {"containers": None}}},
    "containers as text": {"template": {"spec": {"containers": "x"}}},
    "tasks as text": {"tasks": "x"},
    "replicas as text": {"mpiReplicaSpecs": "x", "pytorchReplicaSpecs": "x"},
    "roles without templates": {"mpiReplicaSpecs": {"Launcher": None, "Worker": {"replicas": "x"}}},
    "jobs as numbers": {"replicatedJobs": [3]},
    "an environment that is no YAML": {"runtimeEnvYAML": "a: [", "entrypoint": "x"},
    "a runtime of no name": {"runtimeRef": {"name": 3}},
}
APIS = {
    "batch/v1": "Job",
    "batch.volcano.sh/v1alpha1": "Job",
    "kubeflow.org/v1": "PyTorchJob",
    "kubeflow.org/v2beta1": "MPIJob",
    "jobset.x-k8s.io/v1alpha2": "JobSet",
    "ray.io/v1": "RayJob",
    "trainer.kubeflow.org/v1alpha1": "TrainJob",
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("api", APIS)
def test_a_malformed_job_is_an_error_of_one_line(api: str, spec: object) -> None:
    for runtime in (None, {"spec": spec}, {"spec": {"template": {"spec": spec}}}):
        with pytest.raises(SpecError) as error:
            read_manifest({"apiVersion": api, "kind": APIS[api], "spec": spec}, runtime)
        assert "\n" not in str(error.value)


def test_volumes_of_a_wrong_shape_are_left_out() -> None:
    template = bash(f"torchrun --nproc-per-node 8 {TRAINER}", volumeMounts=3, envFrom=[None, {"configMapRef": None}])
    template["spec"]["volumes"] = "x"
    assert read_manifest(batch_job(template), None, {"a": {"data": 3}}).gpus == 8


LAUNCH = f"torchrun --nproc-per-node 8 {TRAINER}"
BATCHED = LAUNCH.replace("_size 2", "_size ${BATCH:-2}")
"""Launch line with a default."""


def read_batch(job: dict[str, Any], data: dict[str, str] | None = None) -> float | None:
    """Return the micro-batch of a job whose ConfigMap `c` has the data."""
    return read_manifest(job, None, {"c": {"data": data or {}}}).launch.plan.micro_batch


def called(words: list[str], args: list[str]) -> dict[str, Any]:
    """Return a batch Job that runs words with arguments, with ConfigMap `c` at /etc/train."""
    job = mounted("")
    job["spec"]["template"]["spec"]["containers"][0] |= {"command": words, "args": args}
    return job


MORE = ["--per_device_train_batch_size", "4"]
CALLS: dict[str, tuple[list[str], list[str], str]] = {
    "all of a text": (["bash", "-c", f'{LAUNCH} "$@"', "--"], MORE, ""),
    "joined to a text": (["bash", "-c", f"{LAUNCH} $*", "--"], MORE, ""),
    "options with a value": (["bash", "-euo", "pipefail", "-c", f'{LAUNCH} "$@"', "--"], MORE, ""),
    "the launch itself": (["bash", "-c", 'exec "$@"', "--"], [*LAUNCH.split(), *MORE], ""),
    "all of a script": (["bash", "/etc/train/x.sh"], MORE, f'{LAUNCH} "$@"'),
    "a script that is a program": (["/etc/train/x.sh"], MORE, f'{LAUNCH} "$@"'),
    "one": (["bash", "/etc/train/x.sh"], ["4"], f"BATCH=${{1:-2}}\n{BATCHED}"),
    "one that is required": (["bash", "/etc/train/x.sh"], ["4"], f"BATCH=${{1:?batch}}\n{BATCHED}"),
    "those behind others": (["bash", "/etc/train/x.sh"], ["x", *MORE], f'shift\n{LAUNCH} "$@"'),
    "a part": (["bash", "/etc/train/x.sh"], ["x", *MORE], f'{LAUNCH} "${{@:2}}"'),
    "their number": (["bash", "/etc/train/x.sh"], ["4"], f"if [ $# -gt 0 ]; then BATCH=4; fi\n{BATCHED}"),
    "of a function": (["bash", "/etc/train/x.sh"], MORE, f'main() {{ {LAUNCH} "$@"; }}\nmain "$@"'),
    "set by a script": (["bash", "/etc/train/x.sh"], [], f'set -- {" ".join(MORE)}\n{LAUNCH} "$@"'),
    "through a text": (["bash", "-c", 'bash /etc/train/x.sh "$@"', "--"], MORE, f'{LAUNCH} "$@"'),
    "a variable of the call": (["bash", "-c", "BATCH=4 bash /etc/train/x.sh"], [], BATCHED),
    "a variable of the text": (["bash", "-c", f"BATCH=4 bash -c '{BATCHED}'"], [], ""),
}


@pytest.mark.parametrize(("words", "args", "script"), CALLS.values(), ids=CALLS)
def test_arguments_of_a_script_are_those_of_the_container(words: list[str], args: list[str], script: str) -> None:
    assert read_batch(called(words, args), {"x.sh": script}) == 4


def test_no_arguments_are_no_words() -> None:
    text = f'main() {{ if [ $# -gt 0 ]; then BATCH=4; fi; }}\nmain "$@"\n{BATCHED} "$@"'
    assert read_batch(called(["bash", "/etc/train/x.sh"], []), {"x.sh": text}) == 2
    assert read_batch(called(["bash", "/etc/train/x.sh"], [""]), {"x.sh": text.replace(' "$@"', " $*")}) == 2


def test_without_arguments_their_defaults_count() -> None:
    assert read_batch(called(["bash", "/etc/train/x.sh"], []), {"x.sh": f"BATCH=${{1:-2}}\n{BATCHED}"}) == 2
    assert read_batch(called(["bash", "-c", f'{LAUNCH} "$@"'], [])) == 2


UNCERTAIN = {
    "a loop over options": 'while [ $# -gt 0 ]; do case "$1" in -b) BATCH="$2"; shift 2;; *) break;; esac; done',
    "a branch": "if nvidia-smi; then shift; fi; BATCH=${1:-2}",
    "a computed number": "shift $N; BATCH=${1:-2}",
}


@pytest.mark.parametrize("text", UNCERTAIN.values(), ids=UNCERTAIN)
def test_arguments_that_only_a_run_knows_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="which is not literal"):
        read_batch(called(["bash", "/etc/train/x.sh"], ["-b", "4"]), {"x.sh": f"{text}\n{BATCHED}"})


def test_unknown_arguments_behind_all_options_are_refused() -> None:
    text = f'while [ $# -gt 0 ]; do shift; done\n{LAUNCH} --bf16 True "$@"'
    with pytest.raises(SpecError, match=r"takes options from \$@, whose value is not literal"):
        read_batch(called(["bash", "/etc/train/x.sh"], MORE), {"x.sh": text})
    secret = {"env": [{"name": "MORE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}
    for more in (secret, {"envFrom": [{"secretRef": {"name": "s"}}]}):
        with pytest.raises(SpecError, match=r"takes options from \$MORE, whose value is not literal"):
            read_batch(batch_job(bash(f"{LAUNCH} --bf16 True $MORE", **more)))
    # A variable that nothing sets is empty.
    assert read_batch(batch_job(bash(f"{LAUNCH} --bf16 True $MORE"))) == 2


def test_a_script_that_is_called_with_different_arguments_is_refused() -> None:
    with pytest.raises(SpecError, match="is called with different arguments"):
        read_batch(mounted("bash /etc/train/x.sh 2; bash /etc/train/x.sh 4"), {"x.sh": LAUNCH})


HIDDEN: dict[str, dict[str, Any]] = {
    "a Secret": {"env": [{"name": "BATCH", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
    "a field": {"env": [{"name": "BATCH", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
    "a ConfigMap": {"env": [{"name": "BATCH", "valueFrom": {"configMapKeyRef": {"name": "no", "key": "k"}}}]},
    "another variable": {
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "BATCH", "value": "$(A)"},
        ]
    },
    "all of a Secret": {"envFrom": [{"secretRef": {"name": "s"}}]},
    "all of a ConfigMap": {"envFrom": [{"configMapRef": {"name": "no"}}]},
}


@pytest.mark.parametrize("more", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("way", ["${BATCH:-2}", "${BATCH-2}", "$(BATCH)", "${BATCH:+2}"])
def test_a_hidden_value_is_not_the_default(way: str, more: dict[str, Any]) -> None:
    command = LAUNCH.replace("_size 2", f"_size {way}")
    with pytest.raises(SpecError, match="which is not literal"):
        read_batch(batch_job(bash(command, **more)))
    job = mounted("bash /etc/train/x.sh")
    job["spec"]["template"]["spec"]["containers"][0] |= more
    with pytest.raises(SpecError, match="which is not literal"):
        read_batch(job, {"x.sh": command})


def test_variables_that_are_read_keep_their_value_beside_a_secret() -> None:
    secret = [{"secretRef": {"name": "wandb"}}, {"configMapRef": {"name": "c"}}]
    assert read_batch(batch_job(bash(BATCHED, envFrom=secret)), {"BATCH": "4"}) == 4
    env = [{"name": "BATCH", "value": "8"}]
    assert read_batch(batch_job(bash(BATCHED, envFrom=secret, env=env)), {"BATCH": "4"}) == 8


@pytest.mark.parametrize("name", ["PET_NNODES", "PET_NPROC_PER_NODE", "NNODES", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"])
@pytest.mark.parametrize("value", ["9" * 5000, "x", "-1", "²"])
def test_a_count_that_is_none_is_an_error_of_one_line(name: str, value: str) -> None:
    env = [{"name": name, "value": value}, {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]
    command = {"NNODES": "llamafactory-cli train x.yaml", "WORLD_SIZE": f"python {TRAINER}"}.get(name)
    job = batch_job(bash(command or f"torchrun {TRAINER}", gpus=1, env=env), 2)
    with pytest.raises(SpecError) as error:
        read_manifest(job)
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()


def mpi_job(command: str) -> dict[str, Any]:
    """Return an MPIJob of two workers with 8 GPUs each."""
    replicas = {
        "Launcher": {"replicas": 1, "template": bash(command, gpus=0)},
        "Worker": {"replicas": 2, "template": pod()},
    }
    spec = {"slotsPerWorker": 8, "mpiReplicaSpecs": replicas}
    return {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {"name": "m"}, "spec": spec}


MPI = {
    "-N 4": "starts 8 processes",
    "-npernode 4": "starts 8 processes",
    "--npernode 4": "starts 8 processes",
    "-ppn 4": "starts 8 processes",
    "--map-by ppr:4:node": "starts 8 processes",
    "--map-by ppr:4:node:PE=2": "starts 8 processes",
    "--map-by ppr:2:socket": "does not say the number of ranks",
    "-H w-0:8": "does not say the number of ranks",
    "-np 8": "starts 8 processes",
    "-np 16 -N 4": "states 8 and 16 ranks",
    "-N x": "is no count",
}


@pytest.mark.parametrize("shell", ["", "bash -c "])
@pytest.mark.parametrize(("options", "reason"), MPI.items(), ids=MPI)
def test_fewer_ranks_than_gpus_are_refused(options: str, reason: str, shell: str) -> None:
    program = f"{shell}'python {TRAINER}'" if shell else f"python {TRAINER}"
    with pytest.raises(SpecError, match=reason):
        read_manifest(mpi_job(f"mpirun {options} {program}"))


@pytest.mark.parametrize(
    "options", ["", "-np 16", "-N 8", "--map-by ppr:8:node", "-np 16 --map-by slot", "-np 16 -H w-0:8,w-1:8"]
)
def test_ranks_on_all_gpus_are_read(options: str) -> None:
    read = read_manifest(mpi_job(f"mpirun {options} python {TRAINER}"))
    assert (read.gpus, read.assumed) == (16, ())


INCLUDED = {
    "--include w-0:0,1": "names 2 GPUs of 1 hosts",
    "-i w-0": "names 8 GPUs of 1 hosts",
    "--include=w-0@w-1:0,1": "names 10 GPUs of 2 hosts",
    "--include w-0@w-0": "is not read",
    "--include w-0:a@w-1": "is not read",
    "--exclude w-0:0": "leaves GPUs out",
}


@pytest.mark.parametrize(("options", "reason"), INCLUDED.items(), ids=INCLUDED)
def test_deepspeed_on_a_part_of_the_gpus_is_refused(options: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        read_manifest(mpi_job(f"deepspeed --hostfile h {options} {TRAINER}"))


def test_deepspeed_on_all_gpus_is_read() -> None:
    assert read_manifest(mpi_job(f"deepspeed --hostfile h --include w-0@w-1 {TRAINER}")).gpus == 16
    with pytest.raises(SpecError, match="names 2 GPUs"):
        read_manifest(batch_job(bash(f"deepspeed --include localhost:0,1 {TRAINER}")))
    assert read_manifest(batch_job(bash(f"deepspeed --include localhost:0,1 {TRAINER}", gpus=2))).gpus == 2


VISIBLE = {
    "before the command": f"CUDA_VISIBLE_DEVICES=0,1 {LAUNCH}",
    "by env": f"env CUDA_VISIBLE_DEVICES=0,1 {LAUNCH}",
    "exported": f"export CUDA_VISIBLE_DEVICES=0,1\n{LAUNCH}",
    "before a text": f"CUDA_VISIBLE_DEVICES=0,1 bash -c '{LAUNCH}'",
    "a device that is not there": f"CUDA_VISIBLE_DEVICES=0,1,8,2,3,4,5,6,7 {LAUNCH}",
}


@pytest.mark.parametrize("command", VISIBLE.values(), ids=VISIBLE)
def test_hidden_gpus_are_refused(command: str) -> None:
    with pytest.raises(SpecError, match="CUDA_VISIBLE_DEVICES shows 2 GPUs, and a pod asks for 8"):
        read_manifest(batch_job(bash(command)))


def test_visible_gpus_are_all_or_assumed() -> None:
    env = [{"name": "CUDA_VISIBLE_DEVICES", "value": "0,1"}]
    with pytest.raises(SpecError, match="shows 2 GPUs"):
        read_manifest(batch_job(bash(LAUNCH, env=env)))
    assert read_manifest(batch_job(bash(f"CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 {LAUNCH}"))).assumed == ()
    read = read_manifest(batch_job(bash(f"CUDA_VISIBLE_DEVICES=$(seq -s, 0 7) {LAUNCH}")))
    assert read.assumed == ("CUDA_VISIBLE_DEVICES is computed by the run: all GPUs of a pod assumed.",)


def env_of(**values: str) -> list[dict[str, str]]:
    """Return literal environment variables."""
    return [{"name": key, "value": value} for key, value in values.items()]


SEPARATE = {
    "trl": (bash("trl sft --model_name_or_path gpt2", env=env_of(NNODES="2")), "in its own pod"),
    "axolotl": (bash("axolotl train /etc/x.yaml", env=env_of(NNODES="2")), "in its own pod"),
    "standalone": (bash(LAUNCH.replace(" ", " --standalone ", 1), env=env_of(PET_NNODES="2")), "separate runs"),
    "standalone nodes": (bash(LAUNCH.replace(" ", " --standalone --nnodes 2 ", 1)), "separate runs"),
    "a literal rank": (bash(f"python {TRAINER}", gpus=1, env=env_of(RANK="0", WORLD_SIZE="2")), "separate run in"),
}


@pytest.mark.parametrize(("template", "reason"), SEPARATE.values(), ids=SEPARATE)
def test_separate_runs_are_refused(template: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        read_manifest(batch_job(template, 2))


def test_runs_whose_pods_find_each_other_are_read() -> None:
    env = [*env_of(WORLD_SIZE="2"), {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]
    assert read_manifest(batch_job(bash(f"python {TRAINER}", gpus=1, env=env), 2)).gpus == 2
    assert read_manifest(batch_job(bash(LAUNCH, env=env_of(PET_NNODES="2")), 2)).gpus == 16
    config = "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\nfinetuning_type: full\ncutoff_len: 512\n"
    job = mounted("llamafactory-cli train /etc/train/x.yaml")
    job["spec"] |= {"parallelism": 2, "completions": 2}
    job["spec"]["template"]["spec"]["containers"][0]["env"] = env_of(NNODES="2")
    assert read_manifest(job, None, {"c": {"data": {"x.yaml": config}}}).gpus == 16


def test_torchrun_starts_a_process_for_each_gpu_by_default_of_a_pytorch_job() -> None:
    assert read_manifest(pytorch_job(bash(f"torchrun {TRAINER}"))).gpus == 16
    elastic = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4, "nProcPerNode": 8}}
    assert read_manifest(pytorch_job(bash(f"torchrun {TRAINER}"), **elastic)).gpus == 16
    elastic["elasticPolicy"]["nProcPerNode"] = 4
    with pytest.raises(SpecError, match="starts 8 processes"):
        read_manifest(pytorch_job(bash(f"torchrun {TRAINER}"), **elastic))
