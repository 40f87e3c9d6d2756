"""Readers for the API server's audit log of the operator's requests, and the account that the log shows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster import Cluster
from conftest import Helm

CHART = Path(__file__).resolve().parent.parent / "charts" / "tilecast"
NAMESPACE = "tilecast-system"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:tilecast"
WRITING = frozenset({"create", "update", "patch", "delete", "deletecollection"})


def rendered(helm: Helm, *values: str, only: tuple[str, ...] = ()) -> str:
    """Return the chart's objects, or those of some of its templates; values are as `--set` takes them."""
    shown = [f"--show-only=templates/{name}.yaml" for name in only]
    chosen = [f"--set={value}" for value in values]
    return helm("template", "tilecast", str(CHART), f"--namespace={NAMESPACE}", *shown, *chosen)


def account_kubeconfig(cluster: Cluster, helm: Helm, path: Path, *values: str) -> Path:
    """Write a kubeconfig of the chart's service account, which has exactly the rights of the chart's role.

    Args:
        cluster: where the role and the account are applied.
        helm: the program.
        path: file to write.
        values: of the chart, as `--set` takes them.
    """
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    cluster.apply(json.dumps(namespace))
    cluster.apply(rendered(helm, *values, only=("rbac", "serviceaccount")))
    return kubeconfig_of(cluster, "tilecast", NAMESPACE, path)


def kubeconfig_of(cluster: Cluster, account: str, namespace: str, path: Path) -> Path:
    """Write a kubeconfig of an existing service account."""
    token = cluster.kubectl("create", "token", account, f"--namespace={namespace}", "--duration=2h").strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path.write_text(yaml.safe_dump(config))
    return path


def mark(cluster: Cluster) -> int:
    """Return the offset at which the last whole line of the audit log ends now."""
    return cluster.audit_log.read_bytes().rfind(b"\n") + 1


def entries(cluster: Cluster, since: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the entries of the audit log from an offset on."""
    with cluster.audit_log.open("rb") as log:
        log.seek(since)
        for line in log:
            if line.endswith(b"\n"):
                yield json.loads(line)


def of_the_operator(cluster: Cluster, since: int = 0) -> Iterator[dict[str, Any]]:
    """Return the requests of the operator's account."""
    return (entry for entry in entries(cluster, since) if entry["user"]["username"] == ACCOUNT)


def resource(entry: dict[str, Any]) -> str:
    """Return the plural name, with the subresource, such as `trainingjobs/status`."""
    asked = entry["objectRef"]
    return "/".join(filter(None, (asked["resource"], asked.get("subresource"))))


def changes(cluster: Cluster, since: int = 0) -> dict[str, int]:
    """Count how often the operator changed each TrainingJob.

    Versions that its patches made count, not the patches.
    """
    versions: dict[str, set[str]] = defaultdict(set)
    born: dict[str, str] = {}
    for entry in entries(cluster, since):
        answer = entry.get("responseObject", {})
        if entry["objectRef"]["resource"] != "trainingjobs" or answer.get("kind") != "TrainingJob":
            continue
        name, version = answer["metadata"]["name"], answer["metadata"]["resourceVersion"]
        if entry["verb"] == "patch" and entry["user"]["username"] == ACCOUNT:
            versions[name].add(version)
        else:
            born[name] = version
    return {name: len(versions_of_object - {born.get(name)}) for name, versions_of_object in versions.items()}
