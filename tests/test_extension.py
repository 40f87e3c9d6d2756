"""Extensions that CONTRIBUTING promises to take one file or one line, made in a copy of the repository."""

import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Helm
from repository_copy import RepositoryCopy
from test_docs import worked
from tilecast import fuse, zoo
from tilecast.spec import Plan, Plans, Workload

pytestmark = pytest.mark.long

FIXTURES = Path(__file__).resolve().parent / "extension"


class House(RepositoryCopy):
    """A copy of the repository, and ways to add to its package what the fixtures have."""

    def add_file(self, path: str, fixture: str) -> None:
        shutil.copy(FIXTURES / fixture, self.package / path)

    def add_line(self, path: str, line: str, before: str) -> None:
        """Insert a line before the only occurrence of `before`."""
        self.change(path, before, line + before)

    def append(self, path: str, fixture: str) -> None:
        file = self.package / path
        file.write_text(file.read_text() + "\n" + (FIXTURES / fixture).read_text())


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    house = House(tmp_path_factory.mktemp("house"))
    house.add_file("hardware/gpus/zeta-100.toml", "zeta-100.toml")
    house.add_file("hardware/links/zetalink.toml", "zetalink.toml")
    house.append("zoo/presets/decoders.toml", "presets.toml")
    house.append("zoo/huggingface/types/decoders.toml", "types.toml")
    house.add_file("zoo/zeta.py", "zeta.py")
    house.add_line("zoo/families.py", "    zeta,\n", "    vision,\n)")
    house.add_line("zoo/families.py", '    "zeta": replace(_DECODER, build=zeta.build),\n', '    "encoder": replace(')
    house.change("zoo/traced/onnx_file.py", '"tanh": "Tanh"', '"tanh": "Tanh Atanh"')
    house.change("zoo/traced/torch_operators.py", '"tanh": "tanh tanh_"', '"tanh": "tanh tanh_ zeta_act"')
    house.add_line(
        "fuse.py", '    "zeta": FusionPass("look-ups vanish", ("compiled",)),\n', '    "attention": FusionPass('
    )
    look_up = 'rowwise(name, numerics, "embedding", rows, cols, launches=4.0)'
    house.change("zoo/layers.py", f"return {look_up}", f'return drop_when_fused("zeta", {look_up})')
    house.add_file("jobs/kinds/zeta_job.py", "zeta_job.py")
    for folder in ("examples", "tests"):
        shutil.copy(FIXTURES / folder / "zetajob.yaml", house.folder / folder / "existing")
    record = '    "broadcast": Collective({"ring": ring_gather}, _gather_bound, "broadcast"),\n'
    house.add_line("collectives/__init__.py", record, '    "send_recv": Collective(')
    house.add_line(
        "collectives/__init__.py", '            "zeta": lambda size, *_: 0.0 * size,\n', '            "nvls": nvls_all'
    )
    record = 'ObjectiveRecord("zeta", "the zestiest step", "zestiest", "staler", PRICE),\n        '
    house.add_line("objectives.py", record, 'ObjectiveRecord("cost",')
    house.add_line(
        "objectives.py", worked("quantity") + "\n\n", "@dataclass(frozen=True, slots=True)\nclass ObjectiveRecord:"
    )
    house.add_line("objectives.py", worked("objective").strip() + ",\n", '        ObjectiveRecord("time",')
    house.generate()
    return house


def node(product: str) -> dict[str, object]:
    labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.count": "8", "kubernetes.io/hostname": "a"}
    resources = {"nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "a", "labels": labels},
        "status": {
            "allocatable": resources,
            "capacity": resources,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def bare(model: str, *more: str, gpus: str = "h100-sxm:8") -> tuple[str, ...]:
    return ("advise", model, "--seq", "512", "--batch", "64", "--gpus", gpus, *more)


def test_a_gpu_is_one_file(house: House) -> None:
    assert "zeta-100" in house.tilecast("show", "gpus")
    assert "zeta-100" in house.tilecast(*bare("gpt2", gpus="zeta-100:8"))
    nodes = house.write("nodes.yaml", node("NVIDIA-Zeta-100"))
    assert "zeta-100" in house.tilecast("show", "pools", "--nodes", nodes)


def test_a_link_is_one_file(house: House) -> None:
    assert "zetalink" in house.tilecast("show", "links")
    rates = "from tilecast.hardware import find_gpu, find_link; print(find_link(find_gpu('zeta-100').intra_link).name)"
    assert house.python(rates) == "zetalink"
    document = {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "GPUPool",
        "metadata": {"name": "mine"},
        "spec": {
            "gpu": {"name": "zeta-100"},
            "gpusPerNode": 8,
            "maxNodes": 1,
            "links": {"intraNode": "zetalink", "interNode": "ethernet-100"},
        },
    }
    assert "zetalink" in house.tilecast("show", "pools", "--nodes", house.write("pool.yaml", document))


def test_a_model_is_one_table(house: House) -> None:
    assert "zeta-1b" in house.tilecast("show", "models")
    assert "zeta-1b" in house.tilecast(*bare("zeta-1b"))


def test_a_type_of_hugging_face_is_one_table(house: House) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 8}
    config = house.write("config.json", {"model_type": "zeta", "vocab_size": 32000, **sizes})
    assert "h100-sxm" in house.tilecast(*bare(config))


def test_a_family_is_one_function_and_one_line(house: House) -> None:
    new, old = (json.loads(house.tilecast(*bare(name, "-o", "json"))) for name in ("zeta-new", "zeta-1b"))
    # An unmeasured family has the range of all families; the rest equals its copy's.
    assert new["recommendation"]["parallelism"] == old["recommendation"]["parallelism"]
    assert new["recommendation"]["stepSeconds"]["target"] == old["recommendation"]["stepSeconds"]["target"]
    assert "h100-sxm" in house.tilecast(*bare("zeta-new", "--lora-rank", "8"))
    assert "AutoModelForCausalLM" in house.tilecast(*bare("zeta-new", "--launch", "trainer"))


def test_an_operator_is_one_word(house: House) -> None:
    program = """
import numpy as np, onnx
weight = onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "w")
nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"]), onnx.helper.make_node("Atanh", ["y"], ["z"])]
ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [8, 64]) for name in "xz"]
onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "zeta", ends[:1], ends[1:], [weight])), "zeta.onnx")
from tilecast.zoo.traced import onnx_file, torch_operators
from pathlib import Path
print([item.kind for item in onnx_file.read(Path("zeta.onnx")).operators])
print(torch_operators.KINDS["zeta_act"])
"""
    kinds, torch_kind = house.python(program).splitlines()
    assert "tanh" in kinds
    assert torch_kind == "tanh"


def find_operators_of_pass() -> list[bool]:
    """Return for eager and for compiled execution whether operators remain that the pass `zeta` removes."""
    found = []
    eager = Workload(zoo.find_preset("gpt2"), 512, 8, "bf16")
    for workload in (eager, replace(eager, execution="compiled")):
        sharded = zoo.build_sharded_graph(workload, Plans.from_plans(Plan(data=8)))
        graph = fuse.apply_passes(sharded.graph, fuse.passes(workload))
        found.append(any(str(op.unless) == "zeta" for block in graph.blocks for op in block.ops))
    return found


def test_a_fusion_pass_is_one_line(house: House) -> None:
    imports = """
from dataclasses import replace
from tilecast import fuse, zoo
from tilecast.spec import Plan, Plans, Workload
"""
    function = find_operators_of_pass
    program = f"{imports}{inspect.getsource(function)}print({function.__name__}())"
    assert house.python(program) == "[True, False]"


def test_a_kind_of_job_is_one_file_an_example_and_what_tests_expect_of_it(house: House) -> None:
    output = house.tilecast("advise", "examples/existing/zetajob.yaml", "--gpus", "a100-80:8", "-o", "yaml")
    (written,) = [item for item in yaml.safe_load_all(output) if item["kind"] == "ZetaJob"]
    assert written["spec"]["replicas"] == 1
    assert "ZetaJob" in house.run("-m", "tilecast", "advise", house.write("no.yaml", {"kind": "Pod"})).stderr
    settings = "from tilecast_operator.settings import Settings; print(Settings.__dataclass_fields__['jobs'].metadata)"
    release = "from tilecast_operator import release; print(list(release.JOB_KINDS))"
    assert "ZetaJobs, " in house.python(settings) and "'ZetaJob'" in house.python(release)
    for name in ("crds/trainingjobs.yaml", "charts/tilecast/crds/trainingjobs.yaml"):
        assert "ZetaJob" in house.read(name)
    for name in ("README.md", "docs/index.md", "docs/jobs.md", "docs/operations.md"):
        assert "ZetaJob" in house.read(name)
    assert "| ZetaJob (Zeta 3) | `spec.run.pause` | pod templates | fixed |\n" in house.read("docs/jobs.md")
    assert "{group: zeta.dev, resources: [zetajobs]}" in house.read("tests/e2e/audit-jobs.yaml")


def test_the_tests_of_kinds_hold_for_one_more(house: House) -> None:
    files = [f"tests/test_{name}.py" for name in ("jobs", "place", "release", "candidates")]
    output = house.output(
        "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-k", "not hostile", "-rA", *files
    )
    assert all(f"test_{name}[zetajob]" in output for name in ("every_example_is_read", "letting_go_resumes_a_job_once"))


def test_the_chart_lets_the_operator_read_one_more_kind_and_makes_its_jobs_wait(house: House, helm: Helm) -> None:
    chart = str(house.folder / "charts" / "tilecast")
    policies = "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
    output = helm("template", "tilecast", chart, "--set=jobs.enabled=true,jobs.gate=true,jobs.place=true", policies)
    shown = [document for document in yaml.safe_load_all(output) if document]
    verbs = {
        document["metadata"]["name"]: rule["verbs"]
        for document in shown
        if document["kind"] == "ClusterRole"
        for rule in document["rules"]
        if (rule["apiGroups"], rule["resources"]) == (["zeta.dev"], ["zetajobs"])
    }
    release = ["get", "list", "patch"]
    assert verbs == {
        "tilecast": ["get", "list", "watch", "patch"],
        "tilecast-release": release,
        "tilecast-release-when-down": release,
    }
    (policy,) = (document["spec"] for document in shown if document["kind"] == "MutatingAdmissionPolicy")
    rule = {"apiGroups": ["zeta.dev"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["zetajobs"]}
    assert rule in policy["matchConstraints"]["resourceRules"]
    (mutation,) = policy["mutations"]
    assert "path: '/spec/run/pause', value: true" in mutation["jsonPatch"]["expression"]


def test_a_collective_and_an_algorithm_are_one_line(house: House) -> None:
    table = house.folder / "table.csv"
    table.write_text("op,bytes,n_gpus,link,latency_us\nbroadcast,1e6,8,nvlink4,40\nall_reduce,1e6,8,nvlink4,40\n")
    output = house.tilecast("validate", "collectives", str(table))
    assert "broadcast" in output
    program = """
import numpy as np
from tilecast import collectives
from tilecast.hardware import find_link
group = collectives.RankGroup(*(np.array([8.0]),) * 3)
links = find_link("nvlink4"), find_link("ethernet-100")
print(float(collectives.fastest_collective_s("all_reduce", np.array([1e9]), group, *links)[0]))
print(collectives.PROGRAMS["broadcast"])
"""
    assert house.python(program).splitlines() == ["0.0", "broadcast"]


def test_an_objective_is_one_line(house: House) -> None:
    assert "zestiest" in house.tilecast(*bare("gpt2", "--objective", "zeta", gpus="h100-sxm:8"))
    assert "zeta" in house.tilecast("advise", "--help")
    schema = house.read("crds/trainingjobs.yaml")
    assert "- zeta" in schema
    assert "the zestiest step (zeta)" in " ".join(schema.split())


def test_an_objective_of_a_new_quantity_is_two_records_of_one_file(house: House) -> None:
    thrifty = "h100-sxm:8,l4:8"
    advices = {
        name: json.loads(house.tilecast(*bare("gpt2", "--objective", name, "-o", "json", gpus=thrifty)))
        for name in ("time", "energy")
    }
    best = advices["energy"]["recommendation"]
    assert "leanest; " in best["reason"] and " kWh per 1000 steps" in best["reason"]

    def energy(offer: dict[str, Any]) -> float:
        watts = {"h100-sxm": 700, "l4": 72}[offer["pool"]]
        return offer["gpus"] * watts * offer["stepSeconds"]["target"] / 3600

    offers = [best, *advices["energy"]["alternatives"]]
    assert {offer["pool"] for offer in offers} == {"h100-sxm", "l4"}
    assert all(f"{float(f'{energy(offer):.3g}'):,g} kWh" in offer["reason"] for offer in offers)
    assert energy(best) <= min(energy(advices["time"]["recommendation"]), *(energy(offer) for offer in offers))
    codes = {item["code"] for item in advices["energy"]["whyNot"]}
    assert "Hungrier" in codes and not codes & {"Slower", "Dearer"}
    assert "- energy" in house.read("crds/trainingjobs.yaml")
