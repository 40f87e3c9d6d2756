"""Show the operator at work: `python tools/demo.py`, or `make cluster-demo`.

The demo starts a throw-away control plane with the GPU nodes of `examples/clusters/mixed.yaml` (H100, A100, L4 and T4,
with the labels that such nodes have), installs the CRDs, starts the operator, and shows the pools that it discovers. It
applies every file of `examples/jobs` and prints the advice for each job. Then a user's GPUPool with its own price
changes the cheapest plan of a job, and a pool that lost its nodes is still priced. In the end everything is stopped.

The demo touches no other cluster, and needs neither a container engine nor a GPU nor root. Exit status: 0 when every
job was answered, 1 when something failed (the operator's last log lines are printed), 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import binaries
from cluster import Cluster, ClusterError, exit_on_sigterm, wait_for
from operator_process import Operator, is_answered

ROOT = Path(__file__).resolve().parent.parent
NODES = ROOT / "examples" / "clusters" / "mixed.yaml"
JOBS = ROOT / "examples" / "jobs"
PREFIX = "tilecast.dev/"
ANSWER_TIMEOUT_S = 60

THRIFTY = """
apiVersion: tilecast.dev/v1alpha1
kind: TrainingJob
metadata: {name: thrifty}
spec:
  model: {preset: llama-2-7b}
  training: {sequenceLength: 4096, globalBatchSize: 1024, precision: bf16}
  objective: cost
"""
BARGAIN = """
apiVersion: tilecast.dev/v1alpha1
kind: GPUPool
metadata: {name: bargain}
spec:
  selector: {node.kubernetes.io/instance-type: p4de.24xlarge}
  price: {perGpuHour: 1.7, currency: USD}
"""


class Narration:
    """Messages about finished steps, with the time since the start and since the last step."""

    def __init__(self) -> None:
        self._started_s = self._last_s = time.monotonic()

    def done(self, what: str) -> None:
        """Print one finished step."""
        now_s = time.monotonic()
        print(f"[{now_s - self._started_s:6.1f} s] {what} ({now_s - self._last_s:.1f} s)", flush=True)
        self._last_s = now_s


def demo() -> None:
    """Run the whole demo.

    Raises:
        ClusterError: a step failed.
        binaries.BinariesError: the programs are missing and cannot be built.
    """
    steps = Narration()
    binaries.ensure("controlplane")
    steps.done("the programs of the control plane are there")
    with Cluster(nodes=NODES) as cluster:
        version = json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
        steps.done(f"Kubernetes {version} is up: etcd, API server, controller manager, scheduler, kwok's nodes")
        cluster.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "node", "--all")
        print(cluster.kubectl("get", "nodes", "-L", "node.kubernetes.io/instance-type,nvidia.com/gpu.product"))
        cluster.apply(ROOT / "crds")
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        steps.done("the CRDs are installed")
        with Operator(cluster) as operator:
            steps.done(f"the operator is ready: {operator.url}/metrics")
            try:
                wait_for(partial(pools, cluster), "pools that are discovered", ANSWER_TIMEOUT_S)
                steps.done("the operator has written the pools of these nodes down")
                print(cluster.kubectl("get", "gpupools"))
                for path in sorted(JOBS.glob("*.yaml")):
                    advise(cluster, path, steps)
                print(cluster.kubectl("get", "trainingjobs.tilecast.dev", "--all-namespaces"))
                second_pass(cluster, steps)
            except ClusterError as error:
                raise ClusterError(f"{error}; the operator's last words:\n{operator.log_tail()}") from None
        steps.done("the operator has stopped")
    steps.done("the control plane has stopped; nothing is left behind")


def advise(cluster: Cluster, path: Path, steps: Narration) -> None:
    """Apply one file and print the operator's answer to each of its jobs.

    Raises:
        ClusterError: the API server refuses the file, or no answer comes.
    """
    cluster.apply(path)
    for document in filter(None, yaml.safe_load_all(path.read_text(encoding="utf-8"))):
        name = document["metadata"]["name"]
        job = wait_for(partial(answered, cluster, name), f"advice for {name}", ANSWER_TIMEOUT_S)
        steps.done(f"kubectl apply -f {path.relative_to(ROOT)}: {name} is answered")
        ready = next(item for item in job["status"]["conditions"] if item["type"] == "Ready")
        print(f"    {ready['reason']}: {ready['message']}")
        for key, value in sorted(job["metadata"].get("annotations", {}).items()):
            if key.startswith(PREFIX):
                print(f"    {key}: {value}")


def pools(cluster: Cluster) -> dict[str, Any]:
    """Return every GPUPool with a summary in its status, by name; empty until all existing ones have one."""
    listed = json.loads(cluster.kubectl("get", "gpupools", "-o", "json"))["items"]
    ready = {item["metadata"]["name"]: item for item in listed if "summary" in item.get("status", {})}
    return ready if len(ready) == len(listed) else {}


def second_pass(cluster: Cluster, steps: Narration) -> None:
    """Change the pools, and show the effect.

    Raises:
        ClusterError: the API server refuses a change, or the operator does not react to it.
    """
    cluster.apply(THRIFTY)
    before = wait_for(partial(answered, cluster, "thrifty"), "advice for thrifty", ANSWER_TIMEOUT_S)
    pool = before["status"]["recommendation"]["pool"]
    steps.done(f"kubectl apply: thrifty, which asks for the cheapest plan, is sent to {pool}")
    cluster.apply(BARGAIN)

    def moved() -> bool:
        job = answered(cluster, "thrifty")
        return job is not None and job["status"]["recommendation"]["pool"] == "bargain"

    wait_for(moved, "advice for the cheaper pool", ANSWER_TIMEOUT_S)
    steps.done("kubectl apply: somebody writes a GPUPool, bargain, that has the A100 nodes for half the price")
    chosen = ["--selector=node.kubernetes.io/instance-type=g4dn.12xlarge"]
    cluster.kubectl("delete", "nodes", *chosen)
    wait_for(
        lambda: pools(cluster).get("t4", {}).get("status", {}).get("nodes") == 0, "an empty pool", ANSWER_TIMEOUT_S
    )
    steps.done("kubectl delete nodes: the T4 nodes are gone, as if scaled to zero; their pool is still priced")
    print(cluster.kubectl("get", "trainingjobs.tilecast.dev,gpupools.tilecast.dev"))
    reason = json.loads(cluster.kubectl("get", "trainingjobs.tilecast.dev", "thrifty", "-o", "json"))
    print(f"    thrifty: {reason['status']['recommendation']['reason']}")


def answered(cluster: Cluster, name: str) -> dict[str, Any] | None:
    """Return the job once the operator has answered it, and None before."""
    job: dict[str, Any] = json.loads(cluster.kubectl("get", "trainingjobs.tilecast.dev", name, "-o", "json"))
    return job if is_answered(job) else None


def main() -> int:
    """Run the command line; see the module's docstring."""
    exit_on_sigterm()
    try:
        demo()
    except (ClusterError, binaries.BinariesError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
