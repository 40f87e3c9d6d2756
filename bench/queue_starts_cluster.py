"""Coverage of the ranges of start estimates on a real control plane with Kueue.

python bench/queue_starts_cluster.py DATA [--seeds 100-109] [--jobs 60] [--median-s 120] [--mode MODE] [--csv FILE]

etcd, the API server, Kueue, the scheduler and the operator are real; kwok ends each pod after the time that it takes on
the GPU that it got. Each seed is a ClusterQueue of its own with 4 T4 and 6 H100, on nodes that all seeds share, so that
the seeds run at once. Its jobs, of models that the first flavor suits and of others, are held until Tilecast places
them by its plan (`queue.enabled`, `jobs.place`) and writes start estimates into the Workloads of those that wait
(`queue.estimates`). A job that was let go without a place would start on another pool than planned, so that nothing is
measured then. Some seconds after all that wait have one, the estimates are read, the operator ends, and Kueue starts
the jobs. On one core, three or four seeds at once are placed while half of their jobs still wait. With `--mode Advise`
nothing is placed: the jobs are created in Kueue's queues, and Kueue chooses their flavors.

True run times are forecasts times deviations drawn from those of published rows, as in `queue_starts.py`: in even
seeds each kind of job deviates on each pool by itself, in odd seeds all share the mean of one source. A start holds if
the time at which Kueue admitted the Workload is in the range, by whole seconds as the API server writes them. `--csv`
writes a row for each, with times in seconds since the jobs were created.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tools"), str(ROOT / "predictor"), str(ROOT / "operator")]

from cluster import Cluster, ClusterError, wait_for  # noqa: E402
from controllers import Controllers  # noqa: E402
from operator_process import Operator  # noqa: E402
from queue_starts import Published, read_published  # noqa: E402
from tilecast import jobs, nodes  # noqa: E402
from tilecast.api import training_job  # noqa: E402
from tilecast.planner.options import list_job_options  # noqa: E402

MIXED = ROOT / "examples" / "clusters" / "mixed.yaml"
T4, H100 = "t4", "h100-sxm"
PRODUCTS = {T4: "Tesla-T4", H100: "NVIDIA-H100-80GB-HBM3"}
ENDS = {T4: "on-t4", H100: "on-h100"}
"""Annotations from which kwok reads how long a pod runs."""
QUOTAS = {T4: 4, H100: 6}
"""GPUs of each flavor that each queue has."""
KINDS: Sequence[tuple[str, Mapping[str, int]]] = (
    ("resnet-50", {"globalBatchSize": 2}),
    ("bert-base", {"globalBatchSize": 1, "sequenceLength": 128}),
    ("resnet-50", {"globalBatchSize": 256}),
    ("gpt2", {"globalBatchSize": 4, "sequenceLength": 256}),
    ("gpt2", {"globalBatchSize": 32, "sequenceLength": 512}),
    ("bert-large", {"globalBatchSize": 64, "sequenceLength": 256}),
)
"""Models and training of each kind of job. The first two, hardly slower on a T4, are a third."""
VARIANTS = 5
"""Workloads of each kind whose forecasts deviate each by itself, so that a queue has as many as `queue_starts.py`."""
SPREAD = 0.6
"""Standard deviation of the logarithm of run times."""
OPERATOR = {
    "TILECAST_JOBS": "true", "TILECAST_PLACE": "true", "TILECAST_READ_KUEUE": "true", "TILECAST_QUEUE": "true",
    "TILECAST_QUEUE_ESTIMATES": "true", "TILECAST_QUEUE_INTERVAL_SECONDS": "10", "TILECAST_SEARCH_PROCESSES": "1",
}  # fmt: skip
PATIENCE = 120.0
"""Factor by which the operator may decide later, since one core searches plans for hundreds of jobs in minutes."""
PLACED = ("Placed", "Queued")
"""Outcomes of a job that was placed by the plan."""
WAIT_S = 480
SETTLE_S = 40.0
"""Seconds after which estimates are read again, so that they are of a plan in which all jobs are placed."""
POLL_S = 6.0


def cluster_nodes(queues: int) -> dict[str, Any]:
    """Return the nodes of the example cluster, T4 and H100 as often as all queues need."""
    items = yaml.safe_load(MIXED.read_text())["items"]
    made = list[dict[str, Any]]()
    for pool, product in PRODUCTS.items():
        some = [item for item in items if item["metadata"].get("labels", {}).get("nvidia.com/gpu.product") == product]
        each = int(some[0]["status"]["allocatable"]["nvidia.com/gpu"])
        for number in range(math.ceil(queues * QUOTAS[pool] / each)):
            node = deepcopy(some[0])
            node["metadata"]["name"] = name = f"{pool}-{number}"
            node["metadata"]["labels"]["kubernetes.io/hostname"] = name
            node["spec"]["providerID"] = f"bench:///{name}"
            made.append(node)
    return {"apiVersion": "v1", "kind": "List", "items": made}


def queue_objects(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the flavors, and for each seed a ClusterQueue and a LocalQueue."""
    head = {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    made: list[dict[str, Any]] = [
        {**head, "kind": "ResourceFlavor", "metadata": {"name": pool},
         "spec": {"nodeLabels": {"nvidia.com/gpu.product": product}}}
        for pool, product in PRODUCTS.items()
    ]  # fmt: skip
    flavors = [
        {"name": pool, "resources": [
            {"name": "cpu", "nominalQuota": "10k"}, {"name": "nvidia.com/gpu", "nominalQuota": quota},
        ]}
        for pool, quota in QUOTAS.items()
    ]  # fmt: skip
    for seed in seeds:
        group = {"coveredResources": ["cpu", "nvidia.com/gpu"], "flavors": flavors}
        spec = {"namespaceSelector": {}, "resourceGroups": [group]}
        made.append({**head, "kind": "ClusterQueue", "metadata": {"name": f"s{seed}"}, "spec": spec})
        local = {"name": f"s{seed}", "namespace": "default"}
        made.append({**head, "kind": "LocalQueue", "metadata": local, "spec": {"clusterQueue": f"s{seed}"}})
    return made


def forecast_steps(every_node: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the forecast seconds of one step of each kind on one GPU, by pool."""
    read, own, slices = nodes.parse_objects(yaml.safe_dump(every_node))
    pools = nodes.discover_pools([nodes.read_node(item) for item in read], own, slices).pools
    seconds = []
    for model, training in KINDS:
        spec = {"model": {"preset": model}, "training": {**training, "precision": "fp16", "steps": 1000}}
        document = training_job.training_job_document(model, {**spec, "constraints": {"gpus": 1}})
        options = list_job_options(training_job.read_request(document), pools)
        seconds.append({item.pool: item.seconds / 1000 for item in options})
    return seconds


def draw_jobs(
    known: Published,
    steps_s: Sequence[Mapping[str, float]],
    seed: int,
    count: int,
    median_s: float,
    lag_s: float,
    mode: str,
) -> list[dict[str, Any]]:
    """Return the Jobs of one seed, in the order of their creation, held if their mode is Initial."""
    draw = np.random.default_rng(seed)
    is_shared = seed % 2 == 1
    common = float(draw.choice(known.means)) if is_shared else 0.0
    errors = known.rests if is_shared else known.deviations
    ratios = [
        [{pool: math.exp(common + float(draw.choice(errors))) for pool in kind} for _ in range(VARIANTS)]
        for kind in steps_s
    ]
    made = []
    for number in range(count):
        kind, variant = int(draw.integers(len(KINDS))), int(draw.integers(VARIANTS))
        model, training = KINDS[kind]
        run_s = median_s * math.exp(SPREAD * float(draw.normal()))
        steps = max(round(run_s / min(steps_s[kind].values())), 1)
        took = {pool: steps * each * ratios[kind][variant][pool] for pool, each in steps_s[kind].items()}
        asked = {"cpu": "1", "nvidia.com/gpu": "1"}
        marks = {
            jobs.MODE: mode, jobs.MODEL: model,
            jobs.TRAINING: json.dumps({**training, "precision": "fp16", "steps": steps}),
        }  # fmt: skip
        if mode == "Initial":
            marks[jobs.NEXT_QUEUE] = f"s{seed}"
        pod = {
            "restartPolicy": "Never",
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "containers": [{"name": "train", "image": "train:1", "resources": {"requests": asked, "limits": asked}}],
        }
        ends = {name: f"{max(took[pool] - lag_s, 0.5):.2f}s" for pool, name in ENDS.items()}
        labels = {jobs.ENABLED: "true", jobs.QUEUE: jobs.HOLD_QUEUE if mode == "Initial" else f"s{seed}"}
        made.append({
            "apiVersion": "batch/v1", "kind": "Job",
            "metadata": {"name": f"s{seed}-{number:02}", "labels": labels, "annotations": marks},
            "spec": {"suspend": True, "template": {"metadata": {"annotations": ends}, "spec": pod}},
        })  # fmt: skip
    return made


def read_all(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.kubectl("get", kind, "-o", "json"))["items"]
    return found


def owner(workload: Mapping[str, Any]) -> str:
    return str(workload["metadata"]["ownerReferences"][0]["name"])


def admitted_s(workload: Mapping[str, Any]) -> float | None:
    """Return the Unix time at which Kueue reserved quota for a Workload, None before."""
    for item in workload.get("status", {}).get("conditions", ()):
        if item["type"] == "QuotaReserved" and item["status"] == "True":
            return seconds(item["lastTransitionTime"])
    return None


def seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def read_estimates(cluster: Cluster, mode: str) -> dict[str, tuple[float, float, float]] | None:
    """Return estimate and range of each waiting job's start, once all that wait have one.

    Raises:
        SystemExit: a job was let go without a place.
    """
    time.sleep(POLL_S)
    marks = [item["metadata"]["annotations"] for item in read_all(cluster, "jobs.batch")]
    outcomes = Counter(item.get(jobs.APPLIED, "") for item in marks)
    if mode == "Initial" and not outcomes.keys() <= {"", *PLACED}:
        raise SystemExit(f"not all jobs were placed: {dict(outcomes)}")
    if mode == "Initial" and outcomes[""]:
        return None
    found = dict[str, tuple[float, float, float]]()
    for item in read_all(cluster, "workloads.kueue.x-k8s.io"):
        marks = item["metadata"].get("annotations", {})
        if admitted_s(item) is None:
            if jobs.START_RANGE not in marks:
                return None
            low, high = map(seconds, marks[jobs.START_RANGE].split("/"))
            found[owner(item)] = seconds(marks[jobs.START_ESTIMATE]), low, high
    return found


def admissions(cluster: Cluster) -> dict[str, float] | None:
    """Return when Kueue admitted each job, once it has admitted all."""
    time.sleep(POLL_S)
    found = {owner(item): admitted_s(item) for item in read_all(cluster, "workloads.kueue.x-k8s.io")}
    known = {name: at for name, at in found.items() if at is not None}
    return known if len(known) == len(found) else None


def applied(cluster: Cluster, text: str) -> bool:
    try:
        cluster.apply(text)
    except ClusterError:
        return False
    return True


def lags(cluster: Cluster, lag_s: float) -> list[float]:
    """Return by how many seconds longer each job that ended held its GPU than it was to run."""
    found = []
    starts = {owner(item): admitted_s(item) for item in read_all(cluster, "workloads.kueue.x-k8s.io")}
    for item in read_all(cluster, "jobs.batch"):
        end, start = item.get("status", {}).get("completionTime"), starts.get(item["metadata"]["name"])
        template = item["spec"]["template"]
        product = template["spec"].get("nodeSelector", {}).get("nvidia.com/gpu.product")
        if end and start is not None and product:
            pool = next(name for name, one in PRODUCTS.items() if one == product)
            ran_s = float(template["metadata"]["annotations"][ENDS[pool]].removesuffix("s"))
            found.append(seconds(end) - start - ran_s - lag_s)
    return found


def measure(
    known: Published, seeds: Sequence[int], count: int, median_s: float, lag_s: float, end_s: float, mode: str
) -> list[tuple[str, float, float, float, float, float]]:
    """Return each job with an estimate, when it was read, the estimate with its range, and the start.

    Print a line for each seed. Times are in seconds since the jobs were created.
    """
    every_node = cluster_nodes(len(seeds))
    steps_s = forecast_steps(every_node)
    drawn = {seed: draw_jobs(known, steps_s, seed, count, median_s, lag_s, mode) for seed in seeds}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "nodes.yaml"
        path.write_text(yaml.safe_dump(every_node))
        with Cluster(nodes=path, stages=ROOT / "tests" / "e2e" / "stages-queue.yaml") as cluster:
            cluster.apply(ROOT / "crds")
            with Controllers(cluster, "jobset", "kueue"):
                text = "\n---\n".join(map(json.dumps, queue_objects(seeds)))
                wait_for(lambda: applied(cluster, text), "Kueue's webhooks", WAIT_S)
                settings = OPERATOR | {"TILECAST_PLACE": str(mode == "Initial").lower()}
                with Operator(cluster, settings=settings, patience=PATIENCE) as operator:
                    began = time.time()
                    for some in zip(*drawn.values(), strict=True):
                        cluster.kubectl("create", "-f", "-", input="\n---\n".join(map(json.dumps, some)))
                    print(f"created after {time.time() - began:.0f} s", flush=True)
                    wait_for(lambda: read_estimates(cluster, mode), "estimates of all that wait", WAIT_S)
                    time.sleep(SETTLE_S)
                    said = wait_for(lambda: read_estimates(cluster, mode), "estimates of all that wait", WAIT_S)
                    read_at = time.time()
                    print(f"{len(said)} estimates read after {read_at - began:.0f} s", flush=True)
                    operator.kill()
                start = wait_for(lambda: admissions(cluster), "all starts", end_s)
                late = lags(cluster, lag_s)
                print(f"jobs held their GPUs longer than planned by {np.median(late):.1f} s (median)", flush=True)
    rows = list[tuple[str, float, float, float, float, float]]()
    for seed in seeds:
        names = [name for name in said if name.startswith(f"s{seed}-")]
        some = [said[name][1] <= start[name] <= said[name][2] for name in names]
        early = sum(start[name] < said[name][1] for name in names)
        ratios = [(start[name] - began) / max(said[name][0] - began, 1.0) for name in names]
        near = sum(said[name][1] - 1 <= start[name] <= said[name][2] + 1 for name in names)
        print(
            f"seed {seed} ({'shared' if seed % 2 else 'own'}): {sum(some)} of {len(some)} in range, {early} earlier, "
            f"{near} within a second; start over estimate, median {np.median(ratios or [math.nan]):.2f}", flush=True,
        )  # fmt: skip
        rows += [(name, *(at - began for at in (read_at, *said[name], start[name]))) for name in names]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", default="100-109")
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--median-s", type=float, default=120.0, help="median run time on the faster GPU")
    parser.add_argument("--lag-s", type=float, default=0.0, help="seconds of the control plane, taken off run times")
    parser.add_argument("--end-s", type=float, default=1500.0, help="most seconds until the last start")
    parser.add_argument("--mode", choices=["Initial", "Advise"], default="Initial", help="mode of the jobs")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    first, last = map(int, options.seeds.split("-"))
    known = read_published(options.data, ["h100-sxm", "t4"])
    sizes = options.jobs, options.median_s, options.lag_s, options.end_s
    rows = measure(known, range(first, last + 1), *sizes, options.mode)
    if options.csv:
        with options.csv.open("w", newline="") as out:
            csv.writer(out).writerows([("job", "read_s", "estimate_s", "earliest_s", "latest_s", "start_s"), *rows])
    held = [low <= start <= high for *_, low, high, start in rows]
    print(f"{last - first + 1} seeds: {np.mean(held):.1%} of {len(held)} starts in their ranges")


if __name__ == "__main__":
    main()
