"""Where step times go: the operator, by `PUT /observations/{namespace}/{name}`, and Prometheus, by a port or a file."""

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
"""Fewer new steps than this wait for the next report; the last one takes what there is."""
TIMEOUT_S = 5.0
STOP_S = 2.0
TOKEN_FILE = "/var/run/secrets/tilecast/token"  # noqa: S105
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
DRIVER_FILE = "/proc/driver/nvidia/version"


@dataclass(frozen=True)
class ReporterSettings:
    """Where reports go, and what they say of the run; the README has the variables."""

    url: str = ""
    job: str = ""
    namespace: str = ""
    token_file: str = TOKEN_FILE
    plan: Mapping[str, Any] = field(default_factory=dict)
    gpus: int | None = None
    metrics_port: int | None = None
    metrics_file: str = ""
    is_reporting: bool = True
    """Only rank 0 reports."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ReporterSettings:
        """The settings of an environment. What cannot be read is told once in the log and left out."""
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
            namespace=environment.get("TILECAST_NAMESPACE", "") or _text(NAMESPACE_FILE),
            token_file=environment.get("TILECAST_TOKEN_FILE", "") or TOKEN_FILE,
            plan=split,
            gpus=_count(environment, "WORLD_SIZE"),
            metrics_port=_count(environment, "TILECAST_METRICS_PORT"),
            metrics_file=environment.get("TILECAST_METRICS_FILE", ""),
            is_reporting=environment.get("RANK", "0") == "0",
        )


@dataclass(frozen=True)
class Taken:
    """Steps since the last report: their median and their number, and what a step went to as far as it is timed.
    Seconds."""

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
"""What Prometheus is told of each part of a step."""

Take = Callable[[int], Taken | None]


class Reporter:
    """A thread that asks for new steps, and tells the operator and Prometheus. Nothing it does reaches the caller.

    Args:
        settings: where to.
        take: given the least number of new steps, what was measured of them, or None.
        interval_s: seconds between two reports.
    """

    def __init__(self, settings: ReporterSettings, take: Take, interval_s: float) -> None:
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
        """Whether anybody is told."""
        settings = self._settings
        goes = bool(settings.url and settings.job) or bool(settings.metrics_file) or settings.metrics_port is not None
        return settings.is_reporting and goes

    @property
    def metrics_port(self) -> int | None:
        """The port that serves /metrics, if one does."""
        return None if self._server is None else self._server.server_address[1]

    def start(self) -> None:
        """Begin, once; on ranks other than 0 nothing happens."""
        if self._thread is not None or not self._settings.is_reporting:
            return
        try:
            if self._settings.metrics_port is not None:
                self._server = self._serve(self._settings.metrics_port)
        except OSError as error:
            log.warning("port %s serves no metrics: %s", self._settings.metrics_port, error)
        self._thread = threading.Thread(target=self._run, name="tilecast-observe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send what is left and end; waits two seconds at most."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        if self._server is not None:
            # From a thread of its own: `shutdown` waits for the loop, and the training does not.
            threading.Thread(target=self._server.shutdown, daemon=True).start()

    def _run(self) -> None:
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

    def _report(self, steps: Taken) -> None:
        self._steps += steps.steps
        peak = _peak_memory_bytes()
        self._text = self._exposition(steps, peak)
        if self._settings.metrics_file:
            _replace(Path(self._settings.metrics_file), self._text)
        if self._settings.url and self._settings.job:
            body = {
                "stepSeconds": steps.seconds,
                "steps": steps.steps,
                **{f"{name}Seconds": seconds for name, seconds in steps.parts.items()},
                "peakMemoryBytes": peak,
                "gpu": _gpu_name(),
                "gpus": self._settings.gpus,
                "driver": _driver(),
                "plan": dict(self._settings.plan) or None,
            }
            self._put({key: value for key, value in body.items() if value is not None})

    def _put(self, body: Mapping[str, Any]) -> None:
        settings = self._settings
        request = urllib.request.Request(  # noqa: S310 (the URL is the operator's, from the pod's own environment)
            f"{settings.url}/observations/{settings.namespace}/{settings.job}",
            data=json.dumps(body, allow_nan=False).encode(),
            method="PUT",
            headers={"Authorization": f"Bearer {_text(settings.token_file)}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            answer.read()

    def _exposition(self, steps: Taken, peak: int | None) -> str:
        """The Prometheus text format, version 0.0.4."""
        labels = f'{{namespace="{_escaped(self._settings.namespace)}",trainingjob="{_escaped(self._settings.job)}"}}'
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

    def _serve(self, port: int) -> ThreadingHTTPServer:
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
    """`torch.cuda` where the training uses it; never imported here."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() and cuda.is_available() else None


def _peak_memory_bytes() -> int | None:
    cuda = torch_cuda()
    return None if cuda is None else int(cuda.max_memory_allocated())


def _gpu_name() -> str | None:
    cuda = torch_cuda()
    return None if cuda is None else str(cuda.get_device_name())


def _driver() -> str | None:
    """The version of NVIDIA's kernel module, as it writes it itself."""
    words = _text(DRIVER_FILE).split("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of it."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def _count(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if text and not text.isdecimal():
        log.warning("%s=%r is no whole number and is left aside", name, text[:40])
    return int(text) if text.isdecimal() else None


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
