"""The whole story on a real control plane with a real Prometheus: advice, measured steps, errors, calibration."""

from __future__ import annotations

import json
import subprocess
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from cluster import Cluster, ClusterError, free_ports, wait_for
from conftest import Helm, ensure_or_fail
from operator_process import Operator
from story import DIRECT, TEAM, Scene, fill_the_dashboards, from_advice_to_a_better_forecast, unfilled
from witness import kubeconfig_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "tilecast"
SYSTEM = "tilecast-observes"
UNKNOWN_GPU = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "NVIDIA-Riddle", "nvidia.com/gpu.count": "8"}


@pytest.fixture(scope="module")
def operator(cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The operator with the rights of the chart, which writes and learns without delay."""
    chosen = ["--set=queue.enabled=true"]
    chosen += [f"--show-only=templates/{name}.yaml" for name in ("rbac", "serviceaccount")]
    cluster.kubectl("create", "namespace", SYSTEM)
    cluster.kubectl("create", "namespace", TEAM)
    cluster.apply(helm("template", "observes", str(CHART), f"--namespace={SYSTEM}", *chosen))
    path = tmp_path_factory.mktemp("account") / "kubeconfig.yaml"
    kubeconfig_of(cluster, "observes-tilecast", SYSTEM, path)
    settings = {
        "TILECAST_OBSERVE_SETTLE_SECONDS": "0.2",
        "TILECAST_CALIBRATE_SETTLE_SECONDS": "0.5",
        "TILECAST_QUEUE": "true",
    }
    with Operator(cluster, kubeconfig=path, settings=settings) as started:
        yield started
        assert "is forbidden" not in started.log_tail(100_000), "the chart's role lacks a verb that the operator needs"
    cluster.kubectl("delete", "namespace", TEAM, SYSTEM, "--wait=false")
    cluster.kubectl("delete", "gpupools", "--all")


@pytest.fixture(scope="module")
def prometheus(operator: Operator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the operator every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    (port,) = free_ports(1)
    target = operator.url.removeprefix("http://")
    jobs = [{"job_name": "tilecast", "static_configs": [{"targets": [target]}]}]
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs})
    )
    program = ensure_or_fail("prometheus") / "prometheus"
    command = [
        str(program), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return bool(DIRECT.open(f"{url}/-/ready", timeout=5).status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    try:
        wait_for(ready, "Prometheus", 120)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def scene(cluster: Cluster, operator: Operator, prometheus: str) -> Scene:
    return Scene(cluster.kubectl, lambda: operator.url, prometheus)


def test_from_advice_over_measured_steps_to_a_better_forecast(scene: Scene, tmp_path: Path) -> None:
    from_advice_to_a_better_forecast(scene, tmp_path)


def test_every_panel_shows_what_the_story_made(cluster: Cluster, scene: Scene) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "riddle", "labels": UNKNOWN_GPU}}
    cluster.kubectl("create", "-f", "-", input=json.dumps(node))
    try:
        fill_the_dashboards(scene)
        with suppress(ClusterError):
            wait_for(lambda: not unfilled(scene), "every panel", 30)
        wrong = unfilled(scene)
        assert not wrong, "\n".join(wrong)
    finally:
        cluster.kubectl("delete", "node", "riddle")
        cluster.kubectl("delete", "gpupool", "bargain", "--ignore-not-found")


def test_a_restart_remembers_what_was_learnt(scene: Scene, operator: Operator) -> None:
    before = scene.with_field("second", "observed") or {}
    operator.stop()
    operator.start()
    third = scene.apply("third")
    first = scene.with_field("first", "forecast") or {}
    assert third["recommendation"]["stepSeconds"]["target"] == pytest.approx(
        first["forecast"]["rawSeconds"] / 1.3, rel=0.05
    )
    after = scene.with_field("second", "observed") or {}
    # Alternatives are priced by the pools that there are now.
    for status in (before, after):
        status.pop("alternatives"), status.pop("alternativesHash")
    assert after == before


def test_forged_and_absurd_reports_are_refused_and_counted(cluster: Cluster, scene: Scene, operator: Operator) -> None:
    good = cluster.kubectl("create", "token", "default", f"--namespace={TEAM}", "--audience=tilecast").strip()
    other = cluster.kubectl("create", "token", "default", "--namespace=default", "--audience=tilecast").strip()
    plain = cluster.kubectl("create", "token", "default", f"--namespace={TEAM}").strip()
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


def test_promtool_finds_nothing_to_say_about_the_metrics(operator: Operator) -> None:
    program = ensure_or_fail("prometheus") / "promtool"
    text = operator.get("/metrics")
    done = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "first" not in text and TEAM not in text, "no job in a label"


def test_kube_state_metrics_has_series_of_single_jobs(cluster: Cluster, operator: Operator) -> None:
    port, telemetry = free_ports(2)
    command = [
        str(ensure_or_fail("kube-state-metrics") / "kube-state-metrics"),
        f"--kubeconfig={cluster.kubeconfig}",
        f"--custom-resource-state-config-file={CHART}/files/custom-resource-state.yaml",
        "--custom-resource-state-only=true",
        f"--port={port}", f"--telemetry-port={telemetry}", "--host=127.0.0.1", "--telemetry-host=127.0.0.1",
    ]  # fmt: skip
    log = (cluster.folder / "kube-state-metrics.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, env=cluster.environment(), start_new_session=True)

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
