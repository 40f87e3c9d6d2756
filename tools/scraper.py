"""A real Prometheus as a child process, and queries of what it has scraped."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

import binaries
from cluster import free_ports, wait_for
from processes import start_logged

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener that reaches 127.0.0.1 without the proxy that the environment may name."""
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30


@contextmanager
def prometheus(
    target: str, folder: Path, interval_s: int = 1, labels: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a Prometheus that scrapes a target, and yield its URL.

    Args:
        target: the host and port to scrape.
        folder: the folder for its files.
        interval_s: the seconds between scrapes.
        labels: additional labels of every series.
    """
    (port,) = free_ports(1)
    jobs = [{"job_name": "tilecast", "static_configs": [{"targets": [target], "labels": dict(labels or {})}]}]
    configuration = {"global": {"scrape_interval": f"{interval_s}s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    command = [
        str(binaries.ensure("prometheus") / "prometheus"), f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    process = start_logged(command, folder / "prometheus.log")
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _is_ready(url), "Prometheus", START_TIMEOUT_S)
        yield url
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """Return Prometheus' answer to an expression now."""
    text = urllib.parse.urlencode({"query": expression})
    with DIRECT.open(f"{url}/api/v1/query?{text}", timeout=60) as answer:
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return result


def _is_ready(url: str) -> bool:
    try:
        return bool(DIRECT.open(f"{url}/-/ready", timeout=5).status == 200)
    except OSError:
        return False
