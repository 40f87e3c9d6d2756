"""Jobs of other kinds: facts read from them, pools they may use, and changes that advice makes in their text."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from existing_jobs import (
    A100,
    EXISTING,
    FACTS,
    ONE_OF_EACH,
    advice_spec,
    example,
    pod_path,
    runtime,
    set_suspend,
)
from tilecast.api import training_job
from tilecast.api.edit import edit_yaml
from tilecast.api.fields import FieldChange, Path
from tilecast.cli import main
from tilecast.jobs import (
    ADMISSION_GATES,
    ADVISOR,
    APPLIED,
    ENABLED,
    IGNORE,
    JOB_KINDS,
    MODE,
    MODEL,
    NEXT_QUEUE,
    PRIORITY_CLASS,
    QUEUE,
    TRAINING,
    Priorities,
    PriorityClass,
    find_training_runtime,
    is_job,
    read_job,
    read_mode,
    require_gpus,
)
from tilecast.spec import SpecError

WITH_PODS = [name for name in ONE_OF_EACH if pod_path(name)]
"""Examples of the kinds that hold their pod templates themselves."""


@pytest.mark.parametrize("name", FACTS)
def test_every_example_is_read(name: str) -> None:
    job, facts = read_job(example(name)), FACTS[name]
    assert {item.name: item.count for item in job.pods} == facts["pods"]
    assert (job.gpus, job.gpus_per_pod) == (facts["gpus"], facts["gpus_per_pod"])
    assert (job.is_suspended, job.has_started) == (facts["is_suspended"], not facts["is_suspended"])
    assert job.is_resizable is facts["is_resizable"]
    assert not job.is_finished and not job.is_owned
    assert job.is_enabled({})


def test_a_train_job_takes_from_its_runtime_what_it_leaves_out() -> None:
    document = example("trainjob")
    assert find_training_runtime(document) == ("ClusterTrainingRuntime", "torch-distributed")
    document["spec"]["trainer"] = {"image": "x"}
    (pods,) = read_job(document, runtime(nodeSelector=A100)).pods
    assert (pods.name, pods.count, pods.gpus, pods.pinned) == ("trainer", 3, 4, A100)
    assert read_job(document).gpus == 0
    with pytest.raises(SpecError, match=r"asks for no GPU; .*resourcesPerNode"):
        require_gpus(read_job(document))


@pytest.mark.parametrize(
    ("name", "status"), [(name, status) for name in ONE_OF_EACH for status in FACTS[name]["started"]]
)
def test_a_suspended_job_that_ran_has_started(name: str, status: dict[str, Any]) -> None:
    document = set_suspend(example(name))
    assert not read_job(document).has_started
    assert read_job({**document, "status": status}).has_started


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_job_is_finished_by_a_condition_of_its_kind_or_in_another_way(name: str) -> None:
    document = example(name)

    def is_finished(status: dict[str, Any]) -> bool:
        return read_job({**document, "status": status}).is_finished

    conditions = JOB_KINDS[document["kind"]].finished
    others = FACTS[name].get("ended", [])
    assert conditions or others
    for condition in conditions:
        for state, expected in (("False", False), ("True", True)):
            assert is_finished({"conditions": [{"type": condition, "status": state}]}) is expected
    assert all(is_finished(status) for status in others)


@pytest.mark.parametrize("name", WITH_PODS)
def test_the_first_pods_with_a_priority_class_name_that_of_the_job(name: str) -> None:
    document: Any = example(name)
    assert read_job(document).pod_priority_class == ""
    pod = document
    for part in pod_path(name):
        pod = pod[part]
    pod["priorityClassName"] = "urgent"
    assert read_job(document).pod_priority_class == "urgent"
    pod["priorityClassName"] = ["urgent"]
    with pytest.raises(SpecError, match=r"priorityClassName"):
        read_job(document)


def test_the_priority_class_of_a_scheduling_policy_wins_over_that_of_pods() -> None:
    document = example("pytorchjob")
    for role, name in (("Worker", "low"), ("Master", "high")):
        document["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]["priorityClassName"] = name
    assert read_job(document).pod_priority_class == "high", "the master's pods come first"
    document["spec"]["runPolicy"] = {"schedulingPolicy": {"priorityClass": "policy"}}
    assert read_job(document).pod_priority_class == "policy"
    document["spec"]["runPolicy"] = {"schedulingPolicy": {"priorityClass": 7}}
    with pytest.raises(SpecError, match=r"schedulingPolicy\.priorityClass"):
        read_job(document)


def test_a_train_job_has_the_priority_class_of_its_runtime() -> None:
    document, given = example("trainjob"), runtime(priorityClassName="of-trainer")
    assert read_job(document, given).pod_priority_class == "of-trainer" and read_job(document).pod_priority_class == ""
    initializer = given["spec"]["template"]["spec"]["replicatedJobs"][0]
    initializer["template"] = {"spec": {"template": {"spec": {"priorityClassName": "of-initializer"}}}}
    assert read_job(document, given).pod_priority_class == "of-initializer", "whose pods come first in Kueue's list"


def test_a_priority_is_that_of_kueue_s_class_then_of_the_pods_then_the_least_default() -> None:
    of_workloads = {"urgent": PriorityClass.from_object({"value": 7})}
    of_pods = {
        "urgent": PriorityClass.from_object({"value": 100}),
        "usual": PriorityClass.from_object({"value": 5, "globalDefault": True}),
        "other": PriorityClass.from_object({"value": 6, "globalDefault": True}),
        "odd": PriorityClass.from_object({"value": "much"}),
    }
    known = Priorities(of_workloads, of_pods)
    assert (
        known.find_priority("urgent", "usual") == 7
        and known.find_priority("", "urgent") == 100
        and known.find_priority("", "") == 5
    )
    assert (
        known.find_priority("gone", "urgent") == known.find_priority("", "gone") == known.find_priority("", "odd") == 0
    )
    assert Priorities().find_priority("", "") == 0
    document = example("job")
    document["metadata"]["labels"][PRIORITY_CLASS] = "urgent"
    assert read_job(document).workload_priority_class == "urgent"


def test_a_job_made_by_another_kind_is_owned() -> None:
    document = example("job")
    document["metadata"]["ownerReferences"] = [{"kind": "JobSet", "name": "x", "controller": True}]
    assert read_job(document).is_owned
    document["metadata"]["ownerReferences"] = [{"kind": "CronJob", "name": "x", "controller": True}]
    assert not read_job(document).is_owned


def test_labels_of_the_job_win_over_those_of_the_namespace() -> None:
    document = example("job")
    on = {ENABLED: "true"}
    document["metadata"]["labels"] = {}
    assert read_job(document).is_enabled(on) and not read_job(document).is_enabled({})
    document["metadata"]["labels"] = {ENABLED: "false"}
    assert not read_job(document).is_enabled(on)
    document["metadata"] = {"labels": on, "annotations": {IGNORE: "true"}}
    assert not read_job(document).is_enabled(on)


def held(marks: dict[str, str], labels: dict[str, str], **spec: Any) -> bool:
    document = example("job")
    document["metadata"] = {"name": "x", "annotations": marks, "labels": labels}
    document["spec"] |= spec
    return read_job(document).is_held


def test_only_our_gates_hold_a_job() -> None:
    initial, gate = {MODE: "Initial"}, {ADMISSION_GATES: f"other.example/x, {ADVISOR}"}
    queue = {QUEUE: "team"}
    assert held(gate, queue) and held({**gate, MODE: "Advise"}, queue)
    assert held(initial, {})
    assert not held({}, {}) and not held({MODE: "Advise"}, {})
    assert not held(initial, queue), "Kueue suspends its jobs itself"
    assert not held(initial, {}, suspend=False)
    assert not held({**initial, APPLIED: "True"}, {}), "released once already"
    assert not held({ADMISSION_GATES: "other.example/x"}, queue)
    parked, waiting = {NEXT_QUEUE: "team"}, {QUEUE: "tilecast-hold"}
    assert held(parked, waiting) and held({**parked, APPLIED: "Placed"}, waiting), "an old manifest applied again"
    assert not held(parked, queue), "where it shall be"
    assert not held(parked, {}), "Kueue does not manage it"
    assert not held(parked, waiting, suspend=False) and not held({NEXT_QUEUE: " "}, waiting)


def test_a_parked_job_asks_for_the_quota_of_the_queue_that_it_moves_to() -> None:
    assert read_job(example("job-kueue")).queue == "team" == read_job(example("job-gated")).queue
    assert read_job(example("job-kueue")).current_queue == "tilecast-hold"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "Deployment"}, ("kind", "is no job", "TrainJob")),
        ({"apiVersion": "batch/v1beta1"}, ("apiVersion", "batch/v1")),
        ({"spec": {}}, ("spec", "is not that of a Job", "kubectl explain jobs")),
        ({"spec": None}, ("spec", "is not that of a Job")),
        ({"spec": {"template": {"spec": {"containers": "x"}}}}, ("spec.template.spec.containers", "'x' is not a list")),
        ({"metadata": "x"}, ("metadata", "is not a mapping")),
    ],
)
def test_what_is_no_job_is_told_so(changed: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as raised:
        read_job({**example("job"), **changed})
    assert all(word in str(raised.value) for word in words) and "\n" not in str(raised.value)


SHAPES: list[tuple[str, Path, Any, str]] = [
    *(
        (name, (*pod_path(name), *place), value, problem)
        for name in WITH_PODS
        for place, value, problem in (
            (("nodeSelector",), "x", "is not a mapping"),
            (("nodeSelector",), {"a": 1}, "is not text"),
            (("tolerations",), [1], "is not a mapping"),
            (("containers", 0, "command"), -1, "is not a list"),
            (("containers", 0, "args"), [None], "is not text"),
        )
    ),
    *(
        (name, tuple(item["path"]), item["value"], item["problem"])
        for name in ONE_OF_EACH
        for item in FACTS[name].get("refused", ())
    ),
]


@pytest.mark.parametrize(("name", "path", "value", "problem"), SHAPES)
def test_a_field_of_another_shape_is_named(
    name: str, path: Path, value: Any, problem: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = example(name)
    place = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    status = main(["advise", str(file), "--gpus", "a100-80:16", "-o", "yaml", "--launch", "torchrun"])
    message = capsys.readouterr().err
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    assert (
        status == 2 and message.startswith(f"tilecast: {where}") and problem in message and message.count("\n") == 1
    ), message


def test_resources_without_gpus_are_kept_beside_the_gpus_that_are_advised(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, file = example("trainjob"), tmp_path / "job.yaml"
    document["spec"]["trainer"]["resourcesPerNode"] = {"a": 1}
    file.write_text(yaml.safe_dump(document))
    assert main(["advise", str(file), "--gpus", "a100-80:16", "-o", "yaml"]) == 0
    resources = yaml.safe_load(capsys.readouterr().out)["spec"]["trainer"]["resourcesPerNode"]
    assert resources == {"a": 1, "limits": {"nvidia.com/gpu": 8}}


def test_a_job_without_gpus_is_not_printed_as_one_to_commit(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, file = example("jobset"), tmp_path / "job.yaml"
    del document["spec"]["replicatedJobs"][1]
    file.write_text(yaml.safe_dump(document))
    assert main(["advise", str(file), "--gpus", "a100-80:16", "-o", "yaml", "--launch", "torchrun"]) == 2
    assert "the job asks for no GPU" in capsys.readouterr().err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["spec", "template", "containers", "replicatedJobs", "pytorchReplicaSpecs", "Worker", "resources", "limits",
         "nvidia.com/gpu", "metadata", "annotations", "labels", "status", "conditions", "name", "suspend", "trainer",
         "runtimePatches", "podTemplateOverrides", "parallelism", "affinity", "ownerReferences"]), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300)
@given(st.sampled_from(sorted(JOB_KINDS)), st.dictionaries(st.sampled_from(["spec", "metadata", "status"]), JSON), JSON)
@pytest.mark.slow
def test_hostile_documents_never_crash(kind: str, parts: dict[str, Any], beneath: Any) -> None:
    document = {"apiVersion": JOB_KINDS[kind].api_version, "kind": kind, **parts}
    try:
        job = read_job(document, beneath if isinstance(beneath, dict) else None)
    except SpecError as error:
        assert "\n" not in str(error)
    else:
        assert job.gpus >= 0 and job.is_held in (True, False)


def asked(**marks: str) -> training_job.TrainingJobSpec:
    document = example("job")
    own = {key.replace("_", "/"): value for key, value in marks.items()}
    document["metadata"]["annotations"] = {"tilecast.dev/" + key: value for key, value in own.items()}
    return advice_spec(read_job(document))


BATCH = '{"globalBatchSize": 8, "sequenceLength": 128}'


def test_annotations_are_the_spec_of_a_training_job() -> None:
    spec = asked(model="llama-2-7b", training=BATCH, constraints='{"maxGpus": 8}', objective="cost")
    assert spec.model.preset == "llama-2-7b" and spec.objective == "cost"
    assert spec.training.global_batch_size == 8 and spec.constraints and spec.constraints.max_gpus == 8
    hub = asked(model="openai-community/gpt2-xl", training=BATCH)
    assert training_job.to_request("x", hub).workload.model.name == "gpt2-xl"
    config = training_job.find_model_reference(asked(model="configmap:mine/config.json", training=BATCH))
    assert config and (config.name, config.key) == ("mine", "config.json") and "huggingFace" in config.field
    graph = training_job.find_model_reference(asked(model="configmap:mine/model.onnx", training=BATCH))
    assert graph and "graphRef" in graph.field


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({}, (MODEL, "is missing", "annotate")),
        ({"model": "gpt2"}, (TRAINING, "is missing", "globalBatchSize")),
        ({"model": "gpt2", "training": "{"}, (TRAINING, "no JSON mapping")),
        ({"model": "gpt2", "training": "[]"}, (TRAINING, "no JSON mapping")),
        ({"model": "gpt2", "training": '{"globalBatchSiz": 8}'}, (f"{TRAINING}.globalBatchSiz", "did you mean")),
        ({"model": "configmap:mine", "training": BATCH}, (MODEL, "names no key", "NAME/KEY")),
        ({"model": "gpt2", "training": BATCH, "objective": "speed"}, ("tilecast.dev/objective", "speed")),
    ],
)
def test_a_wrong_annotation_is_named(marks: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as raised:
        asked(**marks)
    assert all(word in str(raised.value) for word in words)


def test_an_unknown_mode_is_told_so() -> None:
    document = example("job")
    assert read_mode(read_job(document)) == "Initial"
    document["metadata"]["annotations"][MODE] = "Auto"
    with pytest.raises(SpecError, match=r"tilecast.dev/mode: 'Auto' is no mode; use one of Off, Advise, Initial"):
        read_mode(read_job(document))


HAND = """\
# top
a:   1   # one
list:
- x
# between
- {k: 'v', n: [1,2]}
deep:
    inner:  # why
        "quoted": yes
        empty:
    block: |
      text

    last: 3

# end
"""


@pytest.mark.parametrize(
    ("path", "value", "before", "after"),
    [
        (("a",), 22, "a:   1   # one", "a:   22   # one"),
        (("a",), "1", "a:   1   # one", "a:   '1'   # one"),
        (("list", 0), "y", "- x", "- y"),
        (("list", 1, "k"), "w", "{k: 'v', n: [1,2]}", "{k: w, n: [1,2]}"),
        (("list", 1, "z"), 3, "- {k: 'v', n: [1,2]}", "- {k: v, n: [1, 2], z: 3}"),
        (("deep", "inner", "new"), {"x": 1}, "        empty:\n", "        empty:\n        new:\n          x: 1\n"),
        (("deep", "block"), "t", "    block: |\n      text\n", "    block: t\n"),
        (("deep", "more", "yet"), [1], "    last: 3\n", "    last: 3\n    more:\n      yet:\n      - 1\n"),
        (("deep", "inner"), {"quoted": False}, '        "quoted": yes\n        empty:\n', '        "quoted": false\n'),
        (("list",), ["x", {"k": "v", "n": [1, 2]}, "z"], "n: [1,2]}\n", "n: [1,2]}\n- z\n"),
    ],
)  # fmt: skip
def test_an_edit_touches_its_place_only(path: tuple[str | int, ...], value: Any, before: str, after: str) -> None:
    assert HAND.count(before) == 1
    assert edit_yaml(HAND, [FieldChange(path, value)]) == HAND.replace(before, after)


KEYS = st.sampled_from(["a", "b c", "nvidia.com/gpu.product", "8"])
VALUES = st.recursive(
    st.integers(0, 9) | st.booleans() | st.text(alphabet="ab:#-'\" {}1", max_size=6),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(KEYS, inner, min_size=1, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(
    st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), st.lists(KEYS, min_size=1, max_size=3), VALUES, st.booleans()
)
@pytest.mark.slow
def test_an_edited_text_means_what_the_edited_value_means(
    old: dict[str, Any], path: list[str], new: Any, flow: bool
) -> None:
    text = yaml.safe_dump(old, default_flow_style=flow, sort_keys=False)
    expected = node = yaml.safe_load(text)
    for key in path[:-1]:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    node[path[-1]] = new
    assert yaml.safe_load(edit_yaml(text, [FieldChange(tuple(path), new)])) == expected


def test_every_example_is_a_job() -> None:
    assert [example(name)["kind"] for name in ONE_OF_EACH] == list(JOB_KINDS)
    assert {path.stem for path in EXISTING} == FACTS.keys(), "tests/existing has what is expected of each"
    assert all(is_job(example(path.stem)) for path in EXISTING)
