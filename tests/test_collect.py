"""Measuring kernels, without the calls of PyTorch, which need a GPU."""

import importlib.util
import io
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import yaml

from tilecast.graph import KIND_NAMES
from tilecast_lab import collect
from tilecast_lab.collect import device
from tilecast_lab.collect.cases import (
    KINDS,
    LARGEST_BYTES,
    LARGEST_FLOPS,
    KernelCase,
    KernelKind,
    log_uniform,
    plan_cases,
)
from tilecast_lab.collect.tables import CollectError, Environment, SkippedError, Tables, Tally, Timing
from tilecast_lab.validate import kernels as tables_of_kernels

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "lab" / "tilecast_lab" / "collect"
EXAMPLE = ROOT / "examples" / "collect"
ENVIRONMENT = Environment("NVIDIA H100 80GB HBM3", "550.54.15", "12.8", "2.9.1+cu128")
TIMING = Timing(12.5e-6, 12e-6, 13e-6, 15)


def cases(count: int, *names: str, seed: int = 0) -> list[KernelCase]:
    return list(islice(plan_cases(names or list(KINDS), seed), count))


def alone(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the folder as a GPU node would: isolated from this project's packages."""
    command = [sys.executable, "-E", "-s", "-S", "-m", FOLDER.name, *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=FOLDER.parent)


def test_the_plan_follows_from_its_seed() -> None:
    shown = [str(case) for case in cases(200)]
    assert shown == [str(case) for case in cases(200)]
    assert shown != [str(case) for case in cases(200, seed=1)]


def test_what_else_is_measured_does_not_change_the_cases_of_a_kind() -> None:
    together = [str(case) for case in cases(500) if case.kind.name == "norm"]
    assert [str(case) for case in cases(len(together), "norm")] == together


def test_a_plan_is_balanced_wherever_it_is_cut() -> None:
    drawn = cases(400)
    share = {name: kind.share / sum(kind.share for kind in KINDS.values()) for name, kind in KINDS.items()}
    for cut in range(20, 401):
        count = Counter(case.kind.name for case in drawn[:cut])
        assert all(abs(count[name] - share[name] * cut) <= 3 for name in KINDS), cut


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_stratum_comes_before_any_comes_again(kind: KernelKind) -> None:
    drawn = cases(len(kind.strata), kind.name)
    assert sorted(str(case.words) for case in drawn) == sorted(str(words) for words in kind.strata)
    assert len({str(case.sizes) for case in drawn}) > len(drawn) / 2


def test_the_plan_covers_dtypes_directions_masks_and_heads() -> None:
    words = {(name, key, value) for name, kind in KINDS.items() for s in kind.strata for key, value in s.items()}
    assert {d for name, key, d in words if (name, key) == ("gemm", "dtype")} == {"fp32", "tf32", "fp16", "bf16", "fp8"}
    assert {d for name, key, d in words if (name, key) == ("conv2d", "pass")} == {"fwd", "bwd_data", "bwd_weight"}
    assert {("attention", "pass", "bwd"), ("attention", "causal", "0"), ("attention", "causal", "1")} <= words
    attention = cases(300, "attention")
    assert {64, 128} < {case.sizes["head_dim"] for case in attention}
    assert 0.2 < np.mean([case.sizes["heads"] > case.sizes["kv_heads"] for case in attention]) < 0.8


def test_no_case_is_beyond_the_limits() -> None:
    for case in cases(2000):
        assert 0 < case.moved_bytes <= LARGEST_BYTES
        assert case.kind.flops(case.words, case.sizes) <= LARGEST_FLOPS[case.words["dtype"]]
        assert all(size >= (0 if name.startswith("pad") else 1) for name, size in case.sizes.items())


def test_causal_attention_is_square() -> None:
    for case in cases(200, "attention"):
        assert case.words["causal"] == "0" or case.sizes["seq_q"] == case.sizes["seq_kv"]


def test_fp8_shapes_are_those_that_the_units_take() -> None:
    fp8 = [case for case in cases(300, "gemm") if case.words["dtype"] == "fp8"]
    assert fp8
    assert all(case.sizes["n"] % 16 == case.sizes["k"] % 16 == 0 for case in fp8)


def test_sizes_are_spread_over_their_orders_of_magnitude() -> None:
    rng = Random(0)  # noqa: S311
    drawn = np.array([log_uniform(rng, 16, 65536, 8) for _ in range(4000)])
    assert (drawn % 8 == 0).all()
    counts = np.histogram(np.log2(drawn), bins=[4, 7, 10, 13, 16])[0]
    assert counts == pytest.approx([1000] * 4, rel=0.15)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_the_tables_are_read_back_as_the_kernels_that_were_measured(kind: KernelKind, tmp_path: Path) -> None:
    drawn = cases(2 * len(kind.strata), kind.name)
    tables = Tables(tmp_path / "new", ENVIRONMENT)
    for case in drawn:
        tables.write(case, TIMING)
    table = tables_of_kernels.read_kernels(tmp_path / "new" / f"{kind.name}.csv")
    assert len(table) == len(drawn)
    assert set(table.gpu) == {ENVIRONMENT.gpu}
    assert table.precision == [case.words["dtype"] for case in drawn]
    assert table.latency_s == pytest.approx(TIMING.median_s)
    assert table.header[-3:] == ["driver", "cuda", "pytorch"]
    assert table.cells[0][-3:] == [ENVIRONMENT.driver, ENVIRONMENT.cuda, ENVIRONMENT.pytorch]
    # The update of parameters is priced with the step and not as a kernel, so its rows may be named only.
    named_only = {"unknown-op"} if kind.name == "optimizer" else set()
    assert set(table.reason) <= {"", *named_only}
    if not named_only:
        assert sorted(table.owner) == list(range(len(drawn)))


PRODUCTS = {"gemm": "gemm", "attention": "attention", "conv2d": "conv"}


@pytest.mark.parametrize("name", [*PRODUCTS, "elementwise", "norm"])
def test_its_traffic_and_work_are_those_of_the_house(name: str, tmp_path: Path) -> None:
    drawn = cases(60, name)
    tables = Tables(tmp_path / "new", ENVIRONMENT)
    for case in drawn:
        tables.write(case, TIMING)
    table = tables_of_kernels.read_kernels(tmp_path / "new" / f"{name}.csv")
    mine = [drawn[row] for row in table.owner]
    moved = np.array([case.moved_bytes for case in mine])
    eight = np.array([case.words["dtype"] == "fp8" for case in mine])
    # FP8 products leave 16-bit outputs here.
    assert moved[~eight] == pytest.approx(table.kernels.bytes()[~eight])
    if name in PRODUCTS:
        assert {KIND_NAMES[code] for code in table.kernels.kind} == {PRODUCTS[name]}
        work = np.array([case.kind.flops(case.words, case.sizes) for case in mine])
        assert work == pytest.approx(table.kernels.flops())


def test_every_row_reaches_its_file_and_the_copy_at_once(tmp_path: Path) -> None:
    copy = io.StringIO()
    tables = Tables(tmp_path / "new", ENVIRONMENT, copy)
    drawn = cases(40)
    for number, case in enumerate(drawn, 1):
        tables.write(case, TIMING)
        files = list((tmp_path / "new").iterdir())
        assert sum(len(file.read_text().splitlines()) - 1 for file in files) == number
    for name in {case.kind.name for case in drawn}:
        prefix = f"{name}.csv:"
        echoed = [line.removeprefix(prefix) for line in copy.getvalue().splitlines() if line.startswith(prefix)]
        assert echoed == (tmp_path / "new" / f"{name}.csv").read_text().splitlines()


def test_measured_tables_are_never_written_over(tmp_path: Path) -> None:
    Tables(tmp_path, ENVIRONMENT).write(cases(1)[0], TIMING)
    with pytest.raises(CollectError, match="name a new folder"):
        Tables(tmp_path, ENVIRONMENT)


def test_no_case_begins_after_the_budget_and_one_that_has_begun_is_finished(tmp_path: Path) -> None:
    now = [1000.0]
    durations: Iterator[float] = itertools.cycle([3.0, 7.0])

    def measure(case: KernelCase) -> Timing:
        now[0] += next(durations)
        return TIMING

    tally = Tally()
    collect.collect(cases(100), measure, Tables(tmp_path, ENVIRONMENT), tally, budget_s=20.5, clock=lambda: now[0])
    # Cases end after 3, 10, 13, 20 and 23 seconds.
    assert tally.measured.total() == 5
    assert now[0] == 1023.0


def test_what_cannot_be_measured_is_counted_by_reason_and_writes_nothing(tmp_path: Path) -> None:
    def measure(case: KernelCase) -> Timing:
        if case.kind.name == "gemm":
            raise SkippedError("out of memory", f"detail of {case.words['dtype']}")
        return TIMING

    tally, drawn = Tally(), cases(60)
    collect.collect(drawn, measure, Tables(tmp_path, ENVIRONMENT), tally, budget_s=1e9)
    gemms = [case for case in drawn if case.kind.name == "gemm"]
    assert tally.skipped == {("gemm", "out of memory"): len(gemms)}
    assert tally.measured.total() == len(drawn) - len(gemms)
    assert not (tmp_path / "gemm.csv").exists()
    assert f"detail of {gemms[0].words['dtype']}" in str(tally)


def test_a_device_that_fails_leaves_whole_rows_and_the_count(tmp_path: Path) -> None:
    def measure(case: KernelCase) -> Timing:
        if tally.measured.total() == 7:
            raise CollectError("CUDA: the device is gone")
        return TIMING

    tally = Tally()
    with pytest.raises(CollectError):
        collect.collect(cases(60), measure, Tables(tmp_path, ENVIRONMENT), tally, budget_s=1e9)
    assert tally.measured.total() == 7
    assert sum(len(tables_of_kernels.read_kernels(file)) for file in tmp_path.iterdir()) == 7


@pytest.mark.parametrize(
    ("first_s", "calls", "repeats"), [(2e-6, 40, 15), (1e-3, 4, 15), (50e-3, 1, 10), (0.5, 1, 3)]
)  # fmt: skip
def test_short_kernels_are_called_often_and_long_ones_seldom(first_s: float, calls: int, repeats: int) -> None:
    assert device.burst_sizes(first_s) == (calls, repeats)


def test_buffers_rotate_beyond_twice_the_l2() -> None:
    l2 = 50 * 2**20
    assert device.count_buffer_sets(40, 1024, l2) == 40  # every call of the burst has its own
    for moved in (4 * 2**20, 30 * 2**20, l2):
        assert (device.count_buffer_sets(1000, moved, l2) - 1) * moved > 2 * l2
    assert device.count_buffer_sets(3, 10 * l2, l2) == 2
    assert device.count_buffer_sets(1, 10 * l2, l2) == 1


def test_a_burst_counts_only_once_the_host_was_ahead() -> None:
    asked: list[int] = []

    def burst(cycles: int) -> tuple[float, bool]:
        asked.append(cycles)
        return cycles * 1e-9, cycles < 4 * device.FIRST_SLEEP_CYCLES

    assert device.time_settled_burst(burst) == pytest.approx(4e-9 * device.FIRST_SLEEP_CYCLES)
    assert len(asked) == 3
    with pytest.raises(SkippedError, match="host-bound"):
        device.time_settled_burst(lambda cycles: (1e-6, True))


def test_a_timing_is_the_median_of_its_bursts() -> None:
    assert Timing.of([3e-6, 1e-6, 9e-6]) == Timing(3e-6, 1e-6, 9e-6, 3)


@pytest.mark.parametrize(
    ("capability", "absent"),
    [((6, 0), {"tf32", "bf16", "fp8"}), ((7, 5), {"tf32", "bf16", "fp8"}), ((8, 0), {"fp8"}), ((9, 0), set())],
)
def test_a_dtype_without_units_is_not_measured_under_its_name(capability: tuple[int, int], absent: set[str]) -> None:
    drawn = cases(100, "gemm")
    left_out = {case.words["dtype"] for case in drawn if device.unsupported_reason(case, capability, "2.9.1")}
    assert left_out == absent


def test_rms_norm_waits_for_the_pytorch_that_fuses_it() -> None:
    rms = next(case for case in cases(50, "norm") if case.words["op"] == "rms_norm" and case.words["dtype"] == "fp32")
    assert device.unsupported_reason(rms, (9, 0), "2.8.0+cu126") == "not fused before PyTorch 2.9"
    assert device.unsupported_reason(rms, (9, 0), "2.10.0a0+git") == ""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build\nGCC 12.3.0", "570.86"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_driver_is_read_from_what_the_kernel_says(text: str, version: str) -> None:
    assert device.driver_version(text) == version


def test_every_kind_can_be_launched() -> None:
    assert device.LAUNCHERS.keys() == KINDS.keys()


def test_the_plan_is_shown_without_pytorch_a_gpu_or_this_project() -> None:
    done = alone("--dry-run", "--cases", "50")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:-1] == [str(case) for case in cases(50)]
    assert lines[-1].startswith("50 kernels: ")
    assert all(name in lines[-1] for name in KINDS)


@pytest.mark.slow
def test_the_command_of_the_house_is_the_same_program() -> None:
    command = [sys.executable, "-m", "tilecast_lab", "collect", "--dry-run", "--cases", "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == alone("--dry-run", "--cases", "50").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "torch: not installed; run this where PyTorch"),
        (("--budget-minutes", "0"), "--budget-minutes: 0 measures nothing; give a positive number"),
        (("--budget-minutes", "nan"), "--budget-minutes: nan measures nothing; give a positive number"),
        (("--cases", "0"), "--cases: 0 leaves nothing to measure; give a positive number"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_exit_status_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    # -S hides the packages of this environment, PyTorch among them.
    done = alone("--output", str(tmp_path / "new"), *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_pytorch_without_a_gpu_is_one_line_and_exit_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", FOLDER.name, "--output", str(tmp_path / "new")]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=hidden, cwd=FOLDER.parent)
    assert done.returncode == 2
    assert done.stderr.startswith("CUDA: PyTorch ")
    assert len(done.stderr.splitlines()) == 1


def test_the_job_runs_restricted_on_one_gpu() -> None:
    pod = yaml.safe_load((EXAMPLE / "job.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all(volume.keys() & {"configMap", "emptyDir"} for volume in pod["volumes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["nodeSelector"] == {}


def test_the_job_runs_the_script_with_arguments_that_it_takes() -> None:
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    given = collect.arguments().parse_args(container["args"])
    assert job["activeDeadlineSeconds"] > given.budget_minutes * 60
    assert job["backoffLimit"] == 0
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert container["command"] == ["python3", "-m", FOLDER.name]
    assert mounts["script"] == f"{container['workingDir']}/{FOLDER.name}"
    assert given.output.is_relative_to(mounts["results"])
    assert {entry["name"]: entry["value"] for entry in container["env"]}["HOME"] == mounts["tmp"]


def test_the_readme_makes_the_config_map_that_the_job_mounts_and_names_every_table() -> None:
    text = (EXAMPLE / "README.md").read_text()
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    volumes = {volume["name"]: volume for volume in job["spec"]["template"]["spec"]["volumes"]}
    name = volumes["script"]["configMap"]["name"]
    assert f"kubectl create configmap {name} --from-file={FOLDER.relative_to(ROOT)}" in text
    assert f"for table in {' '.join(KINDS)}; do" in text
