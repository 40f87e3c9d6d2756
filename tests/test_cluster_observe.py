"""The whole story on a real control plane with a real Prometheus: advice, measured steps, errors, calibration."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster, free_ports, wait_for
from conftest import Helm, ensure_or_fail
from operator_process import Operator
from tilecast_observe import StepTimer
from tilecast_observe.reporter import Settings

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "tilecast"
SYSTEM, TEAM = "tilecast-observes", "team"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
GROUP = 'gpu="h100-sxm",precision="bf16",family="decoder"'


@pytest.fixture(scope="module")
def operator(cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The operator with the rights of the chart, which writes and learns without delay."""
    only = [f"--show-only=templates/{name}.yaml" for name in ("rbac", "serviceaccount")]
    cluster.kubectl("create", "namespace", SYSTEM)
    cluster.kubectl("create", "namespace", TEAM)
    cluster.apply(helm("template", "observes", str(CHART), f"--namespace={SYSTEM}", *only))
    account = "observes-tilecast"
    token = cluster.kubectl("create", "token", account, f"--namespace={SYSTEM}", "--duration=2h").strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = tmp_path_factory.mktemp("account") / "kubeconfig.yaml"
    path.write_text(yaml.safe_dump(config))
    settings = {"TILECAST_OBSERVE_SETTLE_SECONDS": "0.2", "TILECAST_CALIBRATE_SETTLE_SECONDS": "0.5"}
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


def ask(url: str, query: str) -> list[tuple[dict[str, str], float]]:
    text = urllib.parse.urlencode({"query": query})
    with DIRECT.open(f"{url}/api/v1/query?{text}", timeout=10) as answer:
        result = json.load(answer)["data"]["result"]
    return [(item["metric"], float(item["value"][1])) for item in result]


def value(url: str, query: str) -> float | None:
    found = ask(url, query)
    return found[0][1] if len(found) == 1 else None


def apply(cluster: Cluster, name: str) -> dict[str, Any]:
    """A small job under that name, once it has its advice."""
    spec = {
        "model": {"preset": "gpt2-xl"},
        "training": {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "bf16"},
        "constraints": {"gpus": 8, "allowedPools": ["h100-sxm"]},
    }
    job = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}
    cluster.kubectl("create", f"--namespace={TEAM}", "-f", "-", input=json.dumps(job))
    return wait_for(lambda: with_field(cluster, name, "recommendation"), f"advice for {name}", 120)


def with_field(cluster: Cluster, name: str, field: str) -> dict[str, Any] | None:
    found = json.loads(cluster.kubectl("get", "tjob", name, f"--namespace={TEAM}", "-o", "json"))
    status: dict[str, Any] = found.get("status") or {}
    return status if field in status else None


def put(operator: Operator, token: str, name: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(  # noqa: S310
        f"{operator.url}/observations/{TEAM}/{name}", body, {"Authorization": f"Bearer {token}"}, method="PUT"
    )
    try:
        with DIRECT.open(request, timeout=30) as answer:
            return answer.status, json.load(answer)["outcome"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["outcome"]


def test_from_advice_over_measured_steps_to_a_better_forecast(
    cluster: Cluster, operator: Operator, prometheus: str, tmp_path: Path
) -> None:
    token = cluster.kubectl("create", "token", "default", f"--namespace={TEAM}", "--audience=tilecast").strip()
    first = apply(cluster, "first")
    raw = first["recommendation"]["stepSeconds"]["target"]
    for _ in range(20):
        report = json.dumps({"stepSeconds": raw / 1.3, "steps": 50, "gpus": 8}).encode()
        assert put(operator, token, "first", report) == (202, "accepted")

    def observed() -> dict[str, Any] | None:
        found = with_field(cluster, "first", "observed")
        return found if found and found["observed"]["samples"] == 20 else None

    status = wait_for(observed, "20 observations", 120)
    assert status["error"]["rawRatio"] == pytest.approx(0.3, abs=1e-3)
    assert "+30%" in cluster.kubectl("get", "tjob", "first", f"--namespace={TEAM}")

    count = f'tilecast_prediction_relative_error_ratio_count{{{GROUP},stage="raw"}}'
    wait_for(lambda: value(prometheus, count) == 20, "the raw error series", 120)
    bias = wait_for(
        lambda: value(prometheus, f'tilecast_prediction_bias_ratio{{{GROUP},stage="raw"}}'), "the bias", 120
    )
    assert bias == pytest.approx(0.3, abs=1e-3)
    below = 'tilecast_prediction_relative_error_ratio_bucket{stage="raw",le="%s"}'
    assert value(prometheus, below % "0.2") == 0
    assert value(prometheus, below % "0.5") == 20
    assert value(prometheus, 'tilecast_observations_total{source="put",outcome="accepted"}') == 20

    def corrected() -> float | None:
        found = json.loads(cluster.kubectl("get", "gpupool", "h100-sxm", "-o", "json"))["status"].get("calibration", {})
        ratios = [item["ratio"] for item in found.get("corrections", []) if "scale" in item]
        return ratios[0] if ratios else None

    assert wait_for(corrected, "a correction in the pool's status", 120) < 1
    wait_for(lambda: value(prometheus, f"tilecast_calibration_ratio{{{GROUP}}}"), "the calibration series", 120)

    second = apply(cluster, "second")
    forecast = second["recommendation"]["stepSeconds"]
    assert forecast["target"] == pytest.approx(raw / 1.3, rel=0.05)
    assert forecast["upperBound"] / forecast["lowerBound"] < (
        first["recommendation"]["stepSeconds"]["upperBound"] / first["recommendation"]["stepSeconds"]["lowerBound"]
    )

    # The second job reports as a training script does, with the library.
    (tmp_path / "token").write_text(token)
    settings = Settings(url=operator.url, job="second", namespace=TEAM, token_file=str(tmp_path / "token"), gpus=8)
    seconds = iter(range(100))
    with StepTimer(
        warmup_steps=2, interval_s=3600, settings=settings, clock=lambda: next(seconds) * raw / 1.3
    ) as timer:
        for _ in range(12):
            timer.step()
    wait_for(lambda: with_field(cluster, "second", "error"), "the second error", 120)
    status = with_field(cluster, "second", "error") or {}
    assert status["error"]["rawRatio"] == pytest.approx(0.3, abs=0.01)
    assert abs(status["error"]["calibratedRatio"]) < 0.05
    near = 'tilecast_prediction_absolute_relative_error_ratio_bucket{stage="calibrated",le="0.05"}'
    wait_for(lambda: value(prometheus, near) == 1, "the calibrated series", 120)
    left = f'tilecast_prediction_bias_ratio{{{GROUP},stage="calibrated"}}'
    wait_for(lambda: abs(value(prometheus, left) or 1) < 0.05, "the bias that calibration leaves", 120)


def test_a_restart_remembers_what_was_learnt(cluster: Cluster, operator: Operator) -> None:
    before = with_field(cluster, "second", "observed")
    operator.stop()
    operator.start()
    third = apply(cluster, "third")
    first = with_field(cluster, "first", "forecast") or {}
    assert third["recommendation"]["stepSeconds"]["target"] == pytest.approx(
        first["forecast"]["rawSeconds"] / 1.3, rel=0.05
    )
    assert with_field(cluster, "second", "observed") == before


def test_forged_and_absurd_reports_are_refused_and_counted(cluster: Cluster, operator: Operator) -> None:
    good = cluster.kubectl("create", "token", "default", f"--namespace={TEAM}", "--audience=tilecast").strip()
    other = cluster.kubectl("create", "token", "default", "--namespace=default", "--audience=tilecast").strip()
    plain = cluster.kubectl("create", "token", "default", f"--namespace={TEAM}").strip()
    fine = b'{"stepSeconds": 0.5}'
    assert put(operator, other, "first", fine) == (403, "forbidden")
    assert put(operator, plain, "first", fine) == (401, "unauthenticated")
    assert put(operator, good[:-4] + "AAAA", "first", fine) == (401, "unauthenticated")
    assert put(operator, good, "nobody", fine) == (404, "unknown_job")
    assert put(operator, good, "first", b'{"stepSeconds": 0}') == (422, "invalid")
    assert put(operator, good, "first", b'{"stepSeconds": -1}') == (422, "invalid")
    assert put(operator, good, "first", b'{"stepSeconds": NaN}') == (422, "invalid")
    assert put(operator, good, "first", b'{"stepSeconds": 400000}') == (422, "implausible")
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
        return text if "tilecast_gpupool_calibration_ratio{" in text else None

    try:
        text = wait_for(series, "series of kube-state-metrics", 120)
    finally:
        process.terminate()
        process.wait(30)
    lines = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}

    def one(name: str, *labels: str) -> float:
        (found,) = (
            number
            for head, number in lines.items()
            if head.startswith(f"{name}{{") and all(part in head for part in labels)
        )
        return found

    first = ('name="first"', f'namespace="{TEAM}"')
    assert one("tilecast_trainingjob_raw_error_ratio", *first) == pytest.approx(0.3, abs=1e-3)
    assert one("tilecast_trainingjob_observed_samples", *first) == 20
    assert one("tilecast_trainingjob_observed_step_seconds", *first) < one(
        "tilecast_trainingjob_predicted_step_seconds", *first
    )
    assert one("tilecast_trainingjob_condition", *first, 'type="ObservationsAvailable"') == 1
    assert one("tilecast_trainingjob_info", *first, 'pool="h100-sxm"') == 1
    assert one("tilecast_gpupool_raw_error_ratio", 'name="h100-sxm"') == pytest.approx(0.3, abs=0.01)
