"""Query Prometheus for the measured steps and the GPUs of jobs, one job at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Protocol

import aiohttp

from tilecast import untrusted
from tilecast_operator.kube.client import UNREACHABLE
from tilecast_operator.kube.kinds import Key
from tilecast_operator.settings import Settings

log = logging.getLogger("tilecast")


class QuerySource(Protocol):
    """Object that provides a Prometheus query for each job, and records the responses."""

    def queries(self) -> Iterable[tuple[Key, str]]:
        """Return the key and the Prometheus query of every job that may have values."""

    async def record_sample(self, key: Key, outcome: Any) -> None:
        """Record the values in the response to a job's query."""


async def poll_steps(settings: Settings, observations: QuerySource) -> None:
    """Send all queries of a source to Prometheus, once in each interval, without end."""
    url = f"{settings.prometheus_url.rstrip('/')}/api/v1/query"
    timeout = aiohttp.ClientTimeout(total=settings.request_timeout_s)
    # Use a proxy if HTTP_PROXY, HTTPS_PROXY and NO_PROXY name one.
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        while True:
            await asyncio.sleep(settings.prometheus_poll_s)
            for key, query in observations.queries():
                try:
                    async with session.get(url, params={"query": query}) as response:
                        answer = await response.json(content_type=None, loads=untrusted.parse_json)
                    if response.status != 200:
                        problem = str(answer.get("error", ""))[:200] if isinstance(answer, dict) else ""
                        log.warning("%s: Prometheus refuses its query: %s %s", key, response.status, problem)
                        continue
                    await observations.record_sample(key, answer)
                except (*UNREACHABLE, ValueError) as error:
                    log.warning("Prometheus does not answer: %s", error)
                    break
