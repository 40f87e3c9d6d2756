"""What a training script imports: it times steps, reports them to a real HTTP server, and never gets in the way."""

from __future__ import annotations

import http.server
import inspect
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tilecast_observe import LightningCallback, StepTimer, TrainerCallback
from tilecast_observe.reporter import ReporterSettings

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "predictor" / "tilecast_observe"


@dataclass
class ReportServer:
    """An HTTP server that keeps what was PUT to it."""

    url: str = ""
    status: int = 200
    hold: threading.Event = field(default_factory=threading.Event)
    reports: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def operator() -> Iterator[ReportServer]:
    state = ReportServer()
    state.hold.set()

    class ReportHandler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.hold.wait(20)
            state.reports.append((self.path, self.headers["Authorization"], json.loads(body)))
            self.send_response(state.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ReportHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()


@pytest.fixture
def settings(operator: ReportServer, tmp_path: Path) -> ReporterSettings:
    (tmp_path / "token").write_text("secret\n")
    return ReporterSettings(
        url=operator.url, job="llama", namespace="team", token_file=str(tmp_path / "token"), gpus=16
    )


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def wait_for(probe: Callable[[], object]) -> None:
    for _ in range(500):
        if probe():
            return
        time.sleep(0.01)
    pytest.fail("waited in vain")


def steps(timer: StepTimer, clock: Clock, *seconds: float) -> None:
    for one in seconds:
        clock.now += one
        timer.step()


def test_the_median_after_warm_up_is_reported(operator: ReportServer, settings: ReporterSettings) -> None:
    clock = Clock()
    with StepTimer(warmup_steps=3, interval_s=3600, settings=settings, clock=clock) as timer:
        steps(timer, clock, 60.0, 9.0, 5.0, 1.0, 1.1, 0.9, 1.0, 30.0)
    (path, token, body), *rest = operator.reports
    assert not rest
    assert (path, token) == ("/observations/team/llama", "Bearer secret")
    assert body["stepSeconds"] == pytest.approx(1.0)
    assert (body["steps"], body["gpus"]) == (5, 16)
    assert "plan" not in body and "peakMemoryBytes" not in body


def test_what_is_skipped_is_no_step(operator: ReportServer, settings: ReporterSettings) -> None:
    clock = Clock()
    with StepTimer(warmup_steps=0, interval_s=3600, settings=settings, clock=clock) as timer:
        steps(timer, clock, 1.0, 1.0)
        clock.now += 500
        timer.skip()
        steps(timer, clock, 1.0, 1.0)
    assert operator.reports[0][2] == {"stepSeconds": 1.0, "steps": 3, "gpus": 16} | {
        key: value for key, value in operator.reports[0][2].items() if key == "driver"
    }


def test_the_wait_for_data_is_told_where_a_loader_is_timed(operator: ReportServer, settings: ReporterSettings) -> None:
    clock = Clock()

    def loader() -> Iterator[int]:
        for number in range(6):
            clock.now += 100.0 if number == 0 else 0.4
            yield number

    with StepTimer(warmup_steps=1, interval_s=3600, settings=settings, clock=clock) as timer:
        seen = []
        for number in timer.loading(loader()):
            seen.append(number)
            clock.now += 0.6
            timer.step()
    assert seen == list(range(6))
    body = operator.reports[0][2]
    assert (body["stepSeconds"], body["inputSeconds"]) == pytest.approx((1.0, 0.4)), "the first wait is warm-up"


def test_a_loader_fails_as_it_would_alone(settings: ReporterSettings) -> None:
    def loader() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with StepTimer(settings=replace(settings, url="")) as timer, pytest.raises(OSError, match="disk"):
        list(timer.loading(loader()))


def test_on_a_gpu_events_tell_the_wait_and_nothing_waits_for_them(
    operator: ReportServer, settings: ReporterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = SimpleNamespace(now=False)

    class CudaEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            return

        def query(self) -> bool:
            return passed.now

        def elapsed_time(self, end: CudaEvent) -> float:
            return 250.0

    cuda = SimpleNamespace(Event=CudaEvent, is_available=lambda: True, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    clock = Clock()
    timer = StepTimer(warmup_steps=0, interval_s=3600, settings=settings, clock=clock)
    timer.start()
    for number in timer.loading(range(200)):
        passed.now = number > 150
        clock.now += 1.0
        timer.step()
    monkeypatch.delitem(sys.modules, "torch")
    timer.stop()
    assert operator.reports[0][2]["inputSeconds"] == pytest.approx(0.25 * (64 + 200 - 151) / 200, abs=0.02)


def test_each_report_tells_the_steps_since_the_last(operator: ReportServer, settings: ReporterSettings) -> None:
    clock = Clock()
    with StepTimer(warmup_steps=0, interval_s=0.02, settings=settings, clock=clock) as timer:
        steps(timer, clock, *[1.0] * 6)
        wait_for(lambda: operator.reports)
        steps(timer, clock, *[2.0] * 6)
        wait_for(lambda: sum(body["steps"] for _, _, body in operator.reports) == 12)
    assert operator.reports[0][2]["stepSeconds"] == 1.0
    assert operator.reports[-1][2]["stepSeconds"] == 2.0


@pytest.mark.parametrize("fault", ["refused", "gone", "slow", "nonsense", "no token"])
def test_no_failure_reaches_the_training(operator: ReportServer, settings: ReporterSettings, fault: str) -> None:
    if fault == "refused":
        operator.status = 403
    if fault == "gone":
        settings = replace(settings, url="http://127.0.0.1:9")
    if fault == "slow":
        operator.hold.clear()
    if fault == "nonsense":
        settings = replace(settings, url="not a url", metrics_file="/nowhere/at/all.prom", metrics_port=1)
    if fault == "no token":
        settings = replace(settings, token_file=settings.token_file + "s")
    clock = Clock()
    with StepTimer(warmup_steps=0, interval_s=0.01, settings=settings, clock=clock) as timer:
        for _ in range(20):
            steps(timer, clock, *[1.0] * 10)
    if fault == "slow":
        assert operator.reports == [], "it did not wait for the answer"
    operator.hold.set()


def test_an_error_of_the_training_passes_through(operator: ReportServer, settings: ReporterSettings) -> None:
    with pytest.raises(ValueError, match="loss"), StepTimer(0, 3600, settings, Clock()) as timer:
        timer.step()
        raise ValueError("loss is NaN")
    assert len(operator.reports) == 1


def test_only_rank_zero_reports(operator: ReportServer, settings: ReporterSettings) -> None:
    clock = Clock()
    with StepTimer(0, 3600, replace(settings, is_reporting=False), clock) as timer:
        steps(timer, clock, 1.0, 1.0)
    assert operator.reports == []


def test_settings_come_from_the_environment() -> None:
    settings = ReporterSettings.of(
        {
            "TILECAST_URL": "http://tilecast:8080/",
            "TILECAST_JOB": "a",
            "TILECAST_NAMESPACE": "b",
            "RANK": "3",
            "WORLD_SIZE": "32",
            "TILECAST_PLAN": '{"tensor": 2}',
            "TILECAST_METRICS_PORT": "many",
        }
    )
    assert (settings.url, settings.job, settings.namespace, settings.gpus) == ("http://tilecast:8080", "a", "b", 32)
    assert settings.plan == {"tensor": 2}
    assert not settings.is_reporting and settings.metrics_port is None
    assert ReporterSettings.of({"TILECAST_PLAN": "[2]"}).plan == {}


def test_prometheus_reads_the_same_from_a_port_and_from_a_file(
    operator: ReportServer, settings: ReporterSettings, tmp_path: Path
) -> None:
    path, clock = tmp_path / "step.prom", Clock()
    other = replace(settings, metrics_port=0, metrics_file=str(path))
    timer = StepTimer(warmup_steps=0, interval_s=0.01, settings=other, clock=clock)
    with timer:
        steps(timer, clock, *[0.5] * 7)
        wait_for(lambda: path.exists() and operator.reports)
        assert timer._reporter is not None
        url = f"http://127.0.0.1:{timer._reporter.metrics_port}/metrics"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
            served = answer.read().decode()
    assert 'tilecast_step_seconds{namespace="team",trainingjob="llama"} 0.5\n' in served
    assert "tilecast_steps_total" in served
    assert path.read_text() == served


def test_peak_memory_and_gpu_come_from_torch_where_the_training_uses_it(
    operator: ReportServer, settings: ReporterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        max_memory_allocated=lambda: 2**34,
        get_device_name=lambda: "NVIDIA H100 80GB HBM3",
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    clock = Clock()
    with StepTimer(0, 3600, settings, clock) as timer:
        steps(timer, clock, 1.0, 1.0)
    body = operator.reports[0][2]
    assert (body["peakMemoryBytes"], body["gpu"]) == (2**34, "NVIDIA H100 80GB HBM3")


def test_it_imports_the_standard_library_only() -> None:
    code = "import sys; before = set(sys.modules); import tilecast_observe; print(*set(sys.modules) - before)"
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    others = {name.split(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    assert others == {"tilecast_observe"}


def test_the_trainer_callback_times_optimizer_steps(operator: ReportServer, settings: ReporterSettings) -> None:
    """The events of transformers.TrainerCallback in the order in which Trainer calls them."""
    clock = Clock()
    callback = TrainerCallback(StepTimer(0, 3600, settings, clock))
    nothing = (SimpleNamespace(), SimpleNamespace(), SimpleNamespace())

    def call(event: str, passes_s: float = 0.0) -> None:
        clock.now += passes_s
        getattr(callback, event)(*nothing, model=None, logs={})

    call("on_init_end")
    call("on_train_begin")
    call("on_epoch_begin", 5.0)
    for _ in range(3):
        call("on_step_begin")
        call("on_substep_end", 0.5)
        call("on_step_end", 0.5)
        call("on_log")
    call("on_evaluate", 40.0)
    call("on_save", 10.0)
    for _ in range(3):
        call("on_step_end", 1.0)
    call("on_an_event_of_the_future")
    call("on_train_end")
    assert [(body["stepSeconds"], body["steps"]) for _, _, body in operator.reports] == [(1.0, 4)]


def test_the_trainer_callback_is_called_by_the_real_handler(settings: ReporterSettings) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.trainer_callback import CallbackHandler

    clock = Clock()
    callback = TrainerCallback(StepTimer(0, 3600, settings, clock))
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    handler = CallbackHandler([callback], None, None, None, None)
    args = SimpleNamespace()
    handler.on_train_begin(args, state, control)
    for _ in range(3):
        clock.now += 2.0
        handler.on_step_end(args, state, control)
    taken = callback.timer._take(1)
    assert (taken.seconds, taken.steps) == (2.0, 3)
    events = [name for name, _ in inspect.getmembers(transformers.TrainerCallback) if name.startswith("on_")]
    for event in events:
        assert callable(getattr(callback, event))


def test_the_lightning_callback_times_optimizer_steps(operator: ReportServer, settings: ReporterSettings) -> None:
    """The hooks of lightning.pytorch.Callback by their documented signatures; Lightning itself needs torch."""
    clock = Clock()
    callback = LightningCallback(StepTimer(0, 3600, settings, clock))
    trainer, module = SimpleNamespace(global_step=0), SimpleNamespace()
    callback.setup(trainer, module, stage="fit")
    callback.on_train_start(trainer, module)
    callback.on_train_epoch_start(trainer, module)
    for batch in range(8):
        clock.now += 0.5
        trainer.global_step = (batch + 1) // 2
        callback.on_train_batch_end(trainer, module, None, None, batch)
    clock.now += 30
    callback.on_validation_end(trainer, module)
    callback.on_sanity_check_start(trainer, module)
    assert callback.state_dict() == {} and callback.state_key
    callback.on_train_end(trainer, module)
    callback.teardown(trainer, module, stage="fit")
    assert [(body["stepSeconds"], body["steps"]) for _, _, body in operator.reports] == [(1.0, 3)]


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    import zipfile

    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    if subprocess.run([sys.executable, "-c", "import hatchling"], check=False, capture_output=True).returncode:
        pytest.skip("hatchling is not installed here")
    subprocess.run(command, cwd=PACKAGE, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = {f"tilecast_observe/{path.name}" for path in PACKAGE.glob("*.py")}
    assert set(names) == modules | {"tilecast_observe/py.typed"}
