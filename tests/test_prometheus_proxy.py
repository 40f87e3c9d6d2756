"""Prometheus is reached through the proxy that the environment names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from tilecast_operator import prometheus
from tilecast_operator.kube.kinds import Key
from tilecast_operator.settings import Settings

JOB = Key("TrainingJob", "team", "job")
ANSWER = b'{"status": "success"}'


class RecordingProxy(BaseHTTPRequestHandler):
    """Proxy that answers requests itself, and records what they ask for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_request(self, *_: object) -> None:
        pass


@dataclass
class OneJob:
    """Observations of a single job, which has a query."""

    taken: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def queries(self) -> Iterable[tuple[Key, str]]:
        return [(JOB, "up")]

    async def record_sample(self, key: Key, answer: Any) -> None:
        self.taken.put_nowait(answer)


def test_prometheus_is_asked_by_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), RecordingProxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    settings = Settings(prometheus_url="http://prometheus.invalid:9090", prometheus_poll_s=0.01)

    async def first_answer() -> Any:
        job = OneJob()
        asking = asyncio.create_task(prometheus.poll_steps(settings, job))
        try:
            return await asyncio.wait_for(job.taken.get(), 30)
        finally:
            asking.cancel()

    try:
        assert asyncio.run(first_answer()) == {"status": "success"}
    finally:
        server.shutdown()
        server.server_close()
    assert RecordingProxy.asked[0].startswith("http://prometheus.invalid:9090/api/v1/query?query=up")
