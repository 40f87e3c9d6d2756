"""Report step times: to the operator by `PUT /observations/{namespace}/{name}`, to Prometheus by port or file."""

from __future__ import annotations

import json
import logging
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

log = logging.getLogger("tilecast_observe")

LEAST_STEPS = 5
"""Fewest new steps for a report. The last report has no such limit."""
TIMEOUT_S = 5.0
"""Timeout of a request to the operator, in seconds."""
STOP_S = 2.0
"""Longest time that `Reporter.stop` waits for the last report, in seconds."""
TOKEN_FILE = "/var/run/secrets/tilecast/token"  # noqa: S105
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
DRIVER_FILE = "/proc/driver/nvidia/version"


@dataclass(frozen=True)
class ReporterSettings:
    """Address to which reports go, and their description of the run. The README lists the environment variables."""

    url: str = ""
    job: str = ""
    namespace: str = ""
    token_file: str = TOKEN_FILE
    plan: Mapping[str, Any] = field(default_factory=dict)
    gpus: int | None = None
    metrics_port: int | None = None
    metrics_file: str = ""
    is_reporting: bool = True
    """Whether this process reports: only rank 0 does."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ReporterSettings:
        """Return the settings from environment variables. Invalid values are logged and ignored."""
        plan = environment.get("TILECAST_PLAN", "")
        try:
            split = json.loads(plan) if plan else {}
        except ValueError:
            split = None
        if not isinstance(split, dict):
            log.warning("TILECAST_PLAN is no JSON object; the advised plan is assumed")
            split = {}
        return cls(
            url=environment.get("TILECAST_URL", "").rstrip("/"),
            job=environment.get("TILECAST_JOB", ""),
            namespace=environment.get("TILECAST_NAMESPACE", "") or _read_text(NAMESPACE_FILE),
            token_file=environment.get("TILECAST_TOKEN_FILE", "") or TOKEN_FILE,
            plan=split,
            gpus=_read_number(environment, "WORLD_SIZE"),
            metrics_port=_read_number(environment, "TILECAST_METRICS_PORT"),
            metrics_file=environment.get("TILECAST_METRICS_FILE", ""),
            is_reporting=environment.get("RANK", "0") == "0",
        )


@dataclass(frozen=True)
class StepSample:
    """Steps since the last report: their median in seconds, their number, and the mean seconds of each timed part."""

    seconds: float
    steps: int
    parts: Mapping[str, float] = field(default_factory=dict)


PART_HELP = {
    "input": "Mean time of a step that the GPU waited for data.",
    "forward": "Mean time of a step's forward passes.",
    "backward": "Mean time of a step's backward passes.",
    "optimizer": "Mean time of a step's weight update.",
    "communication": "Mean time of a step's collectives that nothing hid.",
}
"""Help texts of Prometheus metrics by part of a step."""

TakeSteps = Callable[[int], StepSample | None]
"""Function that returns the sample of steps since its last result.

Its argument is the fewest new steps for a sample. With fewer, it returns None.
"""


class Reporter:
    """Thread that reports new steps to the operator and to Prometheus. None of its failures reaches the training loop.

    Args:
        settings: destination and contents of the reports.
        take: function that returns the steps since its last result, or None if there are fewer than its argument.
        interval_s: seconds between two reports.
    """

    def __init__(self, settings: ReporterSettings, take: TakeSteps, interval_s: float) -> None:
        self._settings = settings
        self._take = take
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._server: ThreadingHTTPServer | None = None
        self._text = ""
        self._steps = 0
        self._has_warned = False

    @property
    def is_reporting(self) -> bool:
        """Whether this process reports and has a destination."""
        settings = self._settings
        goes = bool(settings.url and settings.job) or bool(settings.metrics_file) or settings.metrics_port is not None
        return settings.is_reporting and goes

    @property
    def metrics_port(self) -> int | None:
        """Port that serves /metrics, or None."""
        return None if self._server is None else self._server.server_address[1]

    def start(self) -> None:
        """Start the thread and the metrics server. A second call, or a call on a rank other than 0, does nothing."""
        if self._thread is not None or not self._settings.is_reporting:
            return
        try:
            if self._settings.metrics_port is not None:
                self._server = self._serve_metrics(self._settings.metrics_port)
        except OSError as error:
            log.warning("port %s serves no metrics: %s", self._settings.metrics_port, error)
        self._thread = threading.Thread(target=self._report_until_stopped, name="tilecast-observe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send a last report and end the thread, after a wait of at most two seconds."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        if self._server is not None:
            # `shutdown` waits for the server's loop; it runs in a thread of its own so that the training does not wait.
            threading.Thread(target=self._server.shutdown, daemon=True).start()

    def _report_until_stopped(self) -> None:
        while True:
            is_last = self._ended.wait(self._interval_s)
            try:
                if (steps := self._take(1 if is_last else LEAST_STEPS)) is not None:
                    self._report(steps)
            except Exception as error:
                if not self._has_warned:
                    log.warning("a step time was not reported, training goes on: %s", error)
                self._has_warned = True
            if is_last:
                return

    def _report(self, steps: StepSample) -> None:
        """Write a sample of steps to the metrics file and send it to the operator."""
        self._steps += steps.steps
        cuda = torch_cuda()
        peak = None if cuda is None else int(cuda.max_memory_allocated())
        self._text = self._prometheus_text(steps, peak)
        if self._settings.metrics_file:
            _replace_file(Path(self._settings.metrics_file), self._text)
        if self._settings.url and self._settings.job:
            body = {
                "stepSeconds": steps.seconds,
                "steps": steps.steps,
                **{f"{name}Seconds": seconds for name, seconds in steps.parts.items()},
                "peakMemoryBytes": peak,
                "gpu": None if cuda is None else str(cuda.get_device_name()),
                "gpus": self._settings.gpus,
                "driver": _driver_version(),
                "plan": dict(self._settings.plan) or None,
            }
            self._send_observation({key: value for key, value in body.items() if value is not None})

    def _send_observation(self, body: Mapping[str, Any]) -> None:
        settings = self._settings
        request = urllib.request.Request(  # noqa: S310 (the URL is the operator's, from the pod's own environment)
            f"{settings.url}/observations/{settings.namespace}/{settings.job}",
            data=json.dumps(body, allow_nan=False).encode(),
            method="PUT",
            headers={"Authorization": f"Bearer {_read_text(settings.token_file)}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            answer.read()

    def _prometheus_text(self, steps: StepSample, peak: int | None) -> str:
        """Return the metrics in the Prometheus text format, version 0.0.4."""
        namespace, job = _escape_label(self._settings.namespace), _escape_label(self._settings.job)
        labels = f'{{namespace="{namespace}",trainingjob="{job}"}}'
        metrics = [
            ("tilecast_step_seconds", "gauge", "Median optimizer step since the last report.", repr(steps.seconds)),
            ("tilecast_steps_total", "counter", "Optimizer steps measured since the start.", str(self._steps)),
        ]
        for name, seconds in steps.parts.items():
            metrics.append((f"tilecast_{name}_seconds", "gauge", PART_HELP[name], repr(seconds)))
        if peak is not None:
            text = "Most GPU memory that PyTorch allocated on this rank."
            metrics.append(("tilecast_peak_memory_bytes", "gauge", text, str(peak)))
        return "".join(
            f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{labels} {value}\n"
            for name, kind, text, value in metrics
        )

    def _serve_metrics(self, port: int) -> ThreadingHTTPServer:
        reporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_metrics = self.path.split("?")[0] == "/metrics"
                body = reporter._text.encode() if is_metrics else b""
                self.send_response(200 if is_metrics else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                return

        server = ThreadingHTTPServer(("", port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="tilecast-metrics", daemon=True).start()
        return server


def torch_cuda() -> Any:
    """Return `torch.cuda` if the training uses it, else None. This function never imports torch."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() and cuda.is_available() else None


def _driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module, or None if `DRIVER_FILE` does not state it."""
    words = _read_text(DRIVER_FILE).split("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _read_text(path: str) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _replace_file(path: Path, text: str) -> None:
    """Replace a file atomically, so that a reader sees either the old text or the new one."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def _read_number(environment: Mapping[str, str], name: str) -> int | None:
    """Return an environment variable as a whole number, or None if it is unset. Other text is logged and ignored."""
    text = environment.get(name, "")
    if text and not text.isdecimal():
        log.warning("%s=%r is no whole number and is left aside", name, text[:40])
    return int(text) if text.isdecimal() else None


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
