"""Tests on an existing cluster, such as kind's, through `TILECAST_TEST_CONTEXT` and `make e2e`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import Cluster, NamedCluster, wait_for

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
OWN = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "of-its-own"}}
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def test_its_own_nodes_are_left_alone_and_ours_are_ready_and_gone_afterwards(binaries: Path) -> None:
    with Cluster(components=PROGRAMS) as there:
        there.kubectl("create", "-f", "-", input=json.dumps(OWN))
        context = there.kubectl("config", "current-context").strip()
        nodes = ROOT / "examples" / "clusters" / "mixed.yaml"
        with NamedCluster(context, nodes=nodes, kubeconfig=there.kubeconfig) as named:
            ours = "--selector=nvidia.com/gpu.product"
            named.kubectl("wait", "--for=condition=Ready", "--timeout=90s", "node", ours)
            assert len(named.kubectl("get", "nodes", ours, "-o", "name").split()) == 14
            status = json.loads(named.kubectl("get", "node", "of-its-own", "-o", "json"))["status"]
            assert "allocatable" not in status and "phase" not in status
        there.kubectl("wait", "--for=delete", "--timeout=60s", "node", ours)
        assert there.kubectl("get", "nodes", "-o", "name").split() == ["node/of-its-own"]


def test_no_controller_ends_because_it_cannot_renew_a_lease(binaries: Path) -> None:
    """On a busy machine the API server may not answer for ten seconds, and nothing restarts these programs."""
    with Cluster(components=PROGRAMS) as alone:
        pod = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "a", "image": "a:1"}]}}
        wait_for(lambda: "default" in alone.kubectl("get", "serviceaccounts"), "the controllers to work")
        alone.kubectl("create", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "Pod", **pod}))
        wait_for(lambda: "Unschedulable" in alone.kubectl("get", "pod", "a", "-o", "yaml"), "the scheduler to work")
        holders = alone.kubectl("get", "leases", "--namespace=kube-system", "-o", "name").split()
        assert all(holder.rpartition("/")[2].startswith("apiserver-") for holder in holders), holders
