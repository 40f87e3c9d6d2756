"""The whole story on a real control plane with a real Prometheus: advice, measured steps, errors, calibration."""

from __future__ import annotations

import json
import subprocess
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster import ClusterError, free_ports, wait_for
from conftest import Helm, ensure_or_fail
from scraper import DIRECT
from sites import RunningOperator, Surroundings, kind, local
from story import TEAM, Scene, fill_the_dashboards, from_advice_to_a_better_forecast, unfilled

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "tilecast"
UNKNOWN_GPU = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "NVIDIA-Riddle", "nvidia.com/gpu.count": "8"}


@pytest.fixture(
    scope="module",
    params=[pytest.param("local", marks=pytest.mark.cluster), pytest.param("kind", marks=pytest.mark.kind)],
)
def site(
    request: pytest.FixtureRequest, helm: Helm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Surroundings]:
    """Yield the operator with the rights of the chart, and a Prometheus: processes, or pods of kind (`make e2e`)."""
    cluster = request.getfixturevalue("kind_cluster" if request.param == "kind" else "cluster")
    made = kind(cluster) if request.param == "kind" else local(cluster, helm, tmp_path_factory.mktemp("site"))
    with made as there:
        yield there
        forbidden = [line for line in there.operator.log_tail(100_000).splitlines() if "is forbidden" in line]
        assert not forbidden, f"the chart's role lacks a verb that the operator needs: {forbidden[0][:500]}"


@pytest.fixture(scope="module")
def operator(site: Surroundings) -> RunningOperator:
    return site.operator


@pytest.fixture(scope="module")
def scene(site: Surroundings) -> Scene:
    return Scene(site.cluster.kubectl, lambda: site.operator.url, site.prometheus)


def test_from_advice_over_measured_steps_to_a_better_forecast(scene: Scene, tmp_path: Path) -> None:
    from_advice_to_a_better_forecast(scene, tmp_path)


def test_every_panel_shows_what_the_story_made(site: Surroundings, scene: Scene) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "riddle", "labels": UNKNOWN_GPU}}
    site.cluster.kubectl("create", "-f", "-", input=json.dumps(node))
    try:
        fill_the_dashboards(scene)
        with suppress(ClusterError):
            wait_for(lambda: not unfilled(scene), "every panel", 30)
        wrong = unfilled(scene)
        assert not wrong, "\n".join(wrong)
    finally:
        site.cluster.kubectl("delete", "node", "riddle")
        site.cluster.kubectl("delete", "gpupool", "bargain", "--ignore-not-found")


def test_a_restart_remembers_what_was_learnt(scene: Scene, operator: RunningOperator) -> None:
    before = scene.with_field("second", "observed") or {}
    operator.stop()
    operator.start()
    third = scene.apply("third")
    first = scene.with_field("first", "forecast") or {}
    assert third["recommendation"]["stepSeconds"]["target"] == pytest.approx(
        first["forecast"]["rawSeconds"] / 1.3, rel=0.05
    )
    after = scene.with_field("second", "observed") or {}
    # Alternatives are priced with the pools that exist now.
    for status in (before, after):
        status.pop("alternatives"), status.pop("alternativesHash")
    assert after == before


def test_forged_and_absurd_reports_are_refused_and_counted(
    site: Surroundings, scene: Scene, operator: RunningOperator
) -> None:
    good = site.cluster.kubectl("create", "token", "default", f"--namespace={TEAM}", "--audience=tilecast").strip()
    other = site.cluster.kubectl("create", "token", "default", "--namespace=default", "--audience=tilecast").strip()
    plain = site.cluster.kubectl("create", "token", "default", f"--namespace={TEAM}").strip()
    fine = b'{"stepSeconds": 0.5}'
    assert scene.put(other, "first", fine) == (403, "forbidden")
    assert scene.put(plain, "first", fine) == (401, "unauthenticated")
    assert scene.put(good[:-4] + "AAAA", "first", fine) == (401, "unauthenticated")
    assert scene.put(good, "nobody", fine) == (404, "unknown_job")
    assert scene.put(good, "first", b'{"stepSeconds": 0}') == (422, "invalid")
    assert scene.put(good, "first", b'{"stepSeconds": -1}') == (422, "invalid")
    assert scene.put(good, "first", b'{"stepSeconds": NaN}') == (422, "invalid")
    assert scene.put(good, "first", b'{"stepSeconds": 400000}') == (422, "implausible")
    text = operator.get("/metrics")
    for outcome in ("forbidden", "unauthenticated", "unknown_job", "invalid", "implausible"):
        assert f'tilecast_observations_total{{outcome="{outcome}",source="put"}}' in text


def test_promtool_finds_nothing_to_say_about_the_metrics(operator: RunningOperator) -> None:
    program = ensure_or_fail("prometheus") / "promtool"
    text = operator.get("/metrics")
    done = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "first" not in text and TEAM not in text, "no job in a label"


def test_kube_state_metrics_has_series_of_single_jobs(site: Surroundings) -> None:
    port, telemetry = free_ports(2)
    command = [
        str(ensure_or_fail("kube-state-metrics") / "kube-state-metrics"),
        f"--kubeconfig={site.cluster.kubeconfig}",
        f"--custom-resource-state-config-file={CHART}/files/custom-resource-state.yaml",
        "--custom-resource-state-only=true",
        f"--port={port}", f"--telemetry-port={telemetry}", "--host=127.0.0.1", "--telemetry-host=127.0.0.1",
    ]  # fmt: skip
    log = (site.cluster.folder / "kube-state-metrics.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, env=site.cluster.environment(), start_new_session=True)

    def series() -> str | None:
        try:
            with DIRECT.open(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = str(answer.read().decode())
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None
        needed = ("tilecast_gpupool_calibration_ratio{", "tilecast_trainingjob_info{")
        return text if all(head in text for head in needed) else None

    try:
        text = wait_for(series, "series of kube-state-metrics", 120)
    finally:
        process.terminate()
        process.wait(30)
    lines = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}

    def one(name: str, *labels: str) -> float:
        (item,) = (
            number
            for head, number in lines.items()
            if head.startswith(f"{name}{{") and all(part in head for part in labels)
        )
        return item

    first = ('name="first"', f'namespace="{TEAM}"')
    assert one("tilecast_trainingjob_raw_error_ratio", *first) == pytest.approx(0.3, abs=1e-3)
    assert one("tilecast_trainingjob_observed_samples", *first) == 20
    assert one("tilecast_trainingjob_observed_step_seconds", *first) < one(
        "tilecast_trainingjob_predicted_step_seconds", *first
    )
    assert one("tilecast_trainingjob_condition", *first, 'type="ObservationsAvailable"') == 1
    assert one("tilecast_trainingjob_info", *first, 'pool="h100-sxm"') == 1
    assert one("tilecast_gpupool_raw_error_ratio", 'name="h100-sxm"') == pytest.approx(0.3, abs=0.01)
