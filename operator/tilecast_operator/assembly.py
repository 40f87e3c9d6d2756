"""The operator: one cache, one writer, one runtime, and the controllers that share them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tilecast.advise import advise
from tilecast.api import gpu_pool, training_job
from tilecast_operator.advisor import Advise, Advisor
from tilecast_operator.cluster.api import Api
from tilecast_operator.cluster.cache import Cache, CacheTable
from tilecast_operator.cluster.discovery import ServedApis
from tilecast_operator.cluster.lists import ListCheck
from tilecast_operator.cluster.view import stamp
from tilecast_operator.cluster.writer import Writer
from tilecast_operator.controllers.admission import Admission
from tilecast_operator.controllers.capacity import Capacity
from tilecast_operator.controllers.job_advice import JobAdvice
from tilecast_operator.controllers.jobs import Jobs
from tilecast_operator.controllers.observations import Observations
from tilecast_operator.controllers.pools import NODES, Pools
from tilecast_operator.controllers.requests import Requests
from tilecast_operator.controllers.runtime import Runtime, SharedContext
from tilecast_operator.controllers.scoring import Scores
from tilecast_operator.controllers.targets import Targets
from tilecast_operator.controllers.token_reviews import TokenReviews
from tilecast_operator.controllers.training_jobs import TrainingJobs
from tilecast_operator.metrics import Metrics
from tilecast_operator.settings import Settings


class Assembly:
    """Everything that runs in one event loop.

    Args:
        settings: of the operator.
        client: of the API server.
        metrics: where everything is counted.
        search: `advise`.
        clock: Unix time.
    """

    def __init__(
        self,
        settings: Settings,
        client: Api,
        metrics: Metrics,
        search: Advise = advise,
        clock: Callable[[], float] = time.time,
    ) -> None:
        cache = Cache(lambda resource: metrics.watch.labels(resource).set(clock()))
        writer = Writer(client, cache, metrics.count_write, lambda: stamp(clock()), settings.instance)
        runtime = Runtime(settings, metrics)
        context = SharedContext(settings, client, cache, writer, runtime, metrics, clock)
        self.settings, self.metrics, self.cache, self.runtime = settings, metrics, cache, runtime
        self.advisor = advisor = Advisor(client, search, metrics.count_search, settings.advisors, settings.advice_cache)
        self.lists = _lists(settings, client, cache)
        self.capacity = capacity = Capacity(context)
        self.pools = pools = Pools(context, advisor, capacity, self.lists)
        scores = Scores(advisor, pools.learner, metrics, context.now)
        self.observations = observations = Observations(context, pools, scores, TokenReviews(client))
        self.requests = requests = Requests(cache, runtime.add)
        advice, discovery = JobAdvice(context, advisor, pools, requests), ServedApis(client)
        self.admission = admission = Admission(context, discovery, requests, advice)
        self.targets = targets = Targets(context, discovery, requests, advice, admission)
        TrainingJobs(context, advisor, pools, capacity, observations, scores, targets)
        if settings.jobs:
            Jobs(context, pools, requests, advice, admission)

    def start(self) -> None:
        """Load the model and start the workers: as many again where jobs of other kinds are advised."""
        self.runtime.start(self.settings.writers * (2 if self.settings.jobs else 1))
        self.runtime.add_task(self.lists.compare(self.settings.watch_check_s), "watch-check")
        self.runtime.add(NODES, self.settings.settle_s)

    async def stop(self) -> None:
        """Stop everything; what was about to be written is computed again at the next start."""
        await self.runtime.stop()
        await self.admission.stop()
        self.advisor.stop()

    def see_pods(self, used: Mapping[str, int] | None) -> None:
        """Take note of the GPUs that pods hold, by node; None where that is not known."""
        self.cache.seen("pods")
        self.capacity.see_pods(used)

    def unhealthy(self) -> str | None:
        """Why this process should be restarted, if it should."""
        return self.runtime.unhealthy() or self.lists.stale(self.settings.stall_s)

    def unready(self) -> str | None:
        """Why no advice can be given yet, if none can."""
        return self.advisor.problem or (None if self.pools.report is not None else "nodes are not read yet")


def _lists(settings: Settings, client: Api, cache: Cache) -> ListCheck:
    tables: dict[str, CacheTable[Any]] = {
        "Node": cache.nodes,
        gpu_pool.KIND: cache.pools,
        training_job.KIND: cache.training_jobs,
    }
    if settings.read_resource_slices:
        tables["ResourceSlice"] = cache.slices
    first = ("Node", gpu_pool.KIND, "ResourceSlice")
    return ListCheck(client, tables, first, ("Node",) if settings.node_selector else ())
