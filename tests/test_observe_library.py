"""The library for training scripts: it times steps, reports them to an HTTP server, and never disturbs the script."""

from __future__ import annotations

import http.server
import inspect
import json
import math
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
from tilecast_observe.parts import PENDING
from tilecast_observe.reporter import ReporterSettings
from tilecast_observe.trace import exposed_share

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "predictor" / "tilecast_observe"


@dataclass
class ReportServer:
    """An HTTP server that keeps every PUT body."""

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
    """A clock that advances only when a test says so."""

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


def test_a_step_whose_parts_nobody_tells_asks_the_clock_once(settings: ReporterSettings) -> None:
    calls: list[float] = []

    def clock() -> float:
        calls.append(float(len(calls)))
        return calls[-1]

    with StepTimer(warmup_steps=1, interval_s=3600, settings=settings, clock=clock) as timer:
        before = len(calls)
        steps(timer, Clock(), 1.0, 1.0, 1.0)
        assert len(calls) == before + 3


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


@dataclass
class CudaClock:
    """`torch.cuda` with events of a GPU that lags behind the host: no GPU, but the same calls."""

    queued_s: float = 0.0
    """Time at which the GPU finishes its queued work."""
    done_s: float = 0.0
    cost_s: float = 0.0
    """Host time that recording an event takes."""
    fails: bool = False
    is_capturing: bool = False
    clock: Clock = field(default_factory=Clock)

    def torch(self) -> SimpleNamespace:
        gpu = self

        class CudaEvent:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at_s = math.inf

            def record(self) -> None:
                if gpu.fails:
                    raise RuntimeError("operation not permitted when stream is capturing")
                self.at_s = gpu.queued_s
                gpu.clock.now += gpu.cost_s

            def query(self) -> bool:
                return self.at_s <= gpu.done_s

            def elapsed_time(self, end: CudaEvent) -> float:
                return 1e3 * (end.at_s - self.at_s)

        cuda = SimpleNamespace(Event=CudaEvent, is_available=lambda: True, is_initialized=lambda: True)
        cuda.is_current_stream_capturing = lambda: gpu.is_capturing
        cuda.max_memory_allocated, cuda.get_device_name = (lambda: 1), (lambda: "NVIDIA H100 80GB HBM3")
        return SimpleNamespace(cuda=cuda)


def train(timer: StepTimer, gpu: CudaClock, count: int, lag_s: float = 0.0) -> None:
    """Run steps of 1 s on the GPU: 0.25 waiting, 0.2 forward, 0.45 backward (0.15 of it communication), 0.1 update."""
    for _ in timer.loading(waiting(gpu, count)):
        with timer.part("forward"):
            gpu.queued_s += 0.2
        with timer.part("backward"):
            gpu.queued_s += 0.3
            with timer.part("communication"):
                gpu.queued_s += 0.15
        with timer.part("optimizer"):
            gpu.queued_s += 0.1
        gpu.clock.now += 1.0
        gpu.done_s = gpu.queued_s - lag_s
        timer.step()


def waiting(gpu: CudaClock, count: int) -> Iterator[int]:
    for number in range(count):
        gpu.queued_s += 0.25
        yield number


PARTS_S = {
    "inputSeconds": 0.25, "forwardSeconds": 0.2, "backwardSeconds": 0.3, "communicationSeconds": 0.15,
    "optimizerSeconds": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("lag_s", [0.0, 3.5, 1e9])
def test_on_a_gpu_events_tell_the_parts_and_nothing_waits_for_them(
    lag_s: float, operator: ReportServer, settings: ReporterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = CudaClock()
    monkeypatch.setitem(sys.modules, "torch", gpu.torch())
    timer = StepTimer(warmup_steps=1, interval_s=3600, settings=settings, clock=gpu.clock)
    timer.start()
    train(timer, gpu, 50, lag_s)
    assert len(timer._parts._pending) <= PENDING
    timer.stop()
    parts = {key: value for key, value in operator.reports[0][2].items() if key in PARTS_S}
    assert parts == (pytest.approx(PARTS_S) if lag_s < 1e9 else {}), "none is told before the GPU is there"


def test_timing_takes_less_than_a_hundredth_of_the_training(
    operator: ReportServer, settings: ReporterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = CudaClock(cost_s=0.01)
    monkeypatch.setitem(sys.modules, "torch", gpu.torch())
    with StepTimer(warmup_steps=0, interval_s=3600, settings=settings, clock=gpu.clock) as timer:
        train(timer, gpu, 400)
        means = {f"{name}Seconds": seconds for name, seconds in timer._parts.take_means().items()}
        gpu.cost_s = 1e-4
        for _ in range(100):
            for _ in range(200):
                with timer.part("forward"):
                    pass
            gpu.clock.now += 1.0
            timer.step()
        spent_s = gpu.clock.now - 500.0
    assert 0 < spent_s < 0.01 * gpu.clock.now
    assert means == pytest.approx(PARTS_S)


@pytest.mark.parametrize("gpu", [CudaClock(fails=True), CudaClock(fails=True, is_capturing=True)])
def test_where_events_fail_or_a_graph_is_captured_the_training_goes_on(
    gpu: CudaClock, operator: ReportServer, settings: ReporterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", gpu.torch())
    with StepTimer(warmup_steps=0, interval_s=3600, settings=settings, clock=gpu.clock) as timer:
        train(timer, gpu, 5)
    assert operator.reports[0][2]["stepSeconds"] == 1.0 and not PARTS_S.keys() & operator.reports[0][2].keys()


def test_parts_end_where_the_training_fails_and_other_names_time_nothing(
    operator: ReportServer, settings: ReporterSettings
) -> None:
    clock = Clock()
    with StepTimer(warmup_steps=0, interval_s=3600, settings=settings, clock=clock) as timer:
        with pytest.raises(ValueError, match="NaN"), timer.part("forward"):
            clock.now += 0.25
            raise ValueError("loss is NaN")
        with timer.part("sideways"):
            clock.now += 0.75
        timer.step()
        timer.begin("backward")
        clock.now += 1.0
        timer.step()
    body = operator.reports[0][2]
    assert (body["stepSeconds"], body["forwardSeconds"]) == pytest.approx((1.0, 0.25))
    assert "sidewaysSeconds" not in body and "backwardSeconds" not in body, "it never ended"


def test_a_part_of_every_second_step_counts_half_and_too_many_parts_not_at_all(
    operator: ReportServer, settings: ReporterSettings
) -> None:
    clock = Clock()
    with StepTimer(warmup_steps=0, interval_s=3600, settings=settings, clock=clock) as timer:
        for number in range(20):
            if number % 2:
                with timer.part("communication"):
                    clock.now += 0.5
            clock.now += 0.5 if number % 2 else 1.0
            timer.step()
        assert timer._parts.take_means() == {"communication": pytest.approx(0.25, rel=0.06)}
        for _ in range(300):
            timer.begin("forward")()
        timer.step()
        train(timer, CudaClock(clock=clock), 3)
        assert timer._parts.take_means() == {}


def test_nothing_is_timed_where_nobody_is_told(settings: ReporterSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    for quiet in (replace(settings, is_reporting=False), replace(settings, url="")):
        gpu = CudaClock(fails=True)
        monkeypatch.setitem(sys.modules, "torch", gpu.torch())
        with StepTimer(warmup_steps=0, interval_s=3600, settings=quiet, clock=gpu.clock) as timer:
            train(timer, gpu, 5)
            timer.traced(None)
            assert timer._parts.take_means() == {} and not timer._is_reading.locked()


def event(name: str, category: str, begin: float, length: float) -> dict[str, Any]:
    """Return an event of a trace as PyTorch 2 writes it, in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": begin, "dur": length}


TRACE = {
    "schemaVersion": 1,
    "traceEvents": [
        event("ProfilerStep#3", "user_annotation", 1000.0, 100.0),
        event("ProfilerStep#3", "gpu_user_annotation", 1000.0, 90.0),
        event("ampere_bf16_s16816gemm", "kernel", 1000.0, 40.0),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", 1030.0, 30.0),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 1045.0, 5.0),
        event("ncclDevKernel_AllGather_RING_LL", "kernel", 1055.0, 10.0),
        event("vectorized_elementwise_kernel", "kernel", 1062.0, 8.0),
        event("aten::mm", "cpu_op", 1000.0, 90.0),
        {"ph": "i", "cat": "kernel", "name": "ncclMark", "ts": 5.0},
    ],
}
"""Trace with collectives from 1030 to 1065, of which 1040 to 1045 and 1050 to 1062 are not hidden."""


def test_a_trace_tells_the_communication_that_nothing_hid() -> None:
    assert exposed_share(TRACE) == pytest.approx(0.17)
    assert exposed_share({"traceEvents": []}) is None
    assert exposed_share({}) is None


def test_a_profile_is_reported_beside_the_passes(operator: ReportServer, settings: ReporterSettings) -> None:
    profile = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(json.dumps(TRACE)))
    broken = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text("{"))
    clock = Clock()
    with StepTimer(warmup_steps=0, interval_s=3600, settings=settings, clock=clock) as timer:
        for one in (broken, None, profile):
            timer.traced(one)
            wait_for(lambda: not any(thread.name == "tilecast-trace" for thread in threading.enumerate()))
        assert timer._exposed == pytest.approx(0.17)
        for _ in range(3):
            with timer.part("backward"):
                clock.now += 0.6
            clock.now += 0.4
            timer.step()
    body = operator.reports[0][2]
    assert (body["communicationSeconds"], body["backwardSeconds"]) == pytest.approx((0.17, 0.43))


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
@pytest.mark.slow
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
    settings = ReporterSettings.from_environment(
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
    assert ReporterSettings.from_environment({"TILECAST_PLAN": "[2]"}).plan == {}


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
        call("on_pre_optimizer_step")
        call("on_optimizer_step", 0.25)
        call("on_step_end", 0.25)
        call("on_log")
    call("on_evaluate", 40.0)
    call("on_save", 10.0)
    for _ in range(3):
        call("on_step_end", 1.0)
    call("on_an_event_of_the_future")
    call("on_train_end")
    ((_, _, body),) = operator.reports
    assert (body["stepSeconds"], body["steps"], body["optimizerSeconds"]) == pytest.approx((1.0, 4, 0.125))


@pytest.mark.parametrize("facts", [{"deepspeed": {"zero_optimization": {}}}, {"deepspeed_plugin": object()}])
def test_deepspeeds_update_is_none_of_the_trainers_optimizer(
    facts: dict[str, Any], operator: ReportServer, settings: ReporterSettings
) -> None:
    clock = Clock()
    callback = TrainerCallback(StepTimer(0, 3600, settings, clock))
    args = SimpleNamespace(**facts)
    callback.on_train_begin(args, None, None)
    for _ in range(3):
        callback.on_pre_optimizer_step(args, None, None)
        callback.on_optimizer_step(args, None, None)
        clock.now += 1.0
        callback.on_step_end(args, None, None)
    callback.on_train_end(args, None, None)
    assert "optimizerSeconds" not in operator.reports[0][2]


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
    taken = callback.timer._take_steps(1)
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
        callback.on_train_batch_start(trainer, module, None, batch)
        clock.now += 0.1
        callback.on_before_backward(trainer, module, None)
        clock.now += 0.2
        callback.on_after_backward(trainer, module)
        if batch % 2:
            callback.on_before_optimizer_step(trainer, module, None)
        clock.now += 0.2
        trainer.global_step = (batch + 1) // 2
        callback.on_train_batch_end(trainer, module, None, None, batch)
    clock.now += 30
    callback.on_validation_end(trainer, module)
    callback.on_sanity_check_start(trainer, module)
    assert callback.state_dict() == {} and callback.state_key
    callback.on_train_end(trainer, module)
    callback.teardown(trainer, module, stage="fit")
    ((_, _, body),) = operator.reports
    assert (body["stepSeconds"], body["steps"]) == pytest.approx((1.0, 3))
    parts = [body[f"{name}Seconds"] for name in ("forward", "backward", "optimizer")]
    assert parts == pytest.approx([0.2, 0.4, 0.2])


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
