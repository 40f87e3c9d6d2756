"""What `-o dra`, `-o kueue` and `-o karpenter` print, before a real API server with the CRDs of their releases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tilecast
from cluster import Cluster, ClusterError
from conftest import ensure_or_fail

ROOT = Path(__file__).resolve().parent.parent
SETTINGS: dict[str, dict[str, object]] = {
    "nodes": {"model": "llama-3.1-8b", "seq": 8192, "batch": 128, "nodes": str(ROOT / "examples/clusters/mixed.yaml")},
    "devices": {"model": "gpt2", "seq": 1024, "batch": 64, "nodes": str(ROOT / "examples/dra/nodes.yaml")},
    "types": {"model": "gpt2", "seq": 1024, "batch": 64, "gpus": "p5.48xlarge:2,g6.48xlarge:1,a100-40-mig-3g.20gb:1"},
    "ten": {
        "model": "gpt2",
        "seq": 1024,
        "batch": 64,
        "gpus": "l4:8,a10:8,a10g:8,a30:8,a40:8,l40:8,l40s:8,h100-sxm:8,h200:8,b200:8",
    },
}

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(bare_cluster: Cluster) -> Iterator[Cluster]:
    """Yield a control plane with the CRDs of Kueue and Karpenter."""
    kueue = ensure_or_fail("kueue") / "manifests" / "crd" / "bases"
    karpenter = ensure_or_fail("karpenter") / "manifests"
    files = [kueue / f"kueue.x-k8s.io_{name}.yaml" for name in ("clusterqueues", "resourceflavors")]
    files.append(karpenter / "karpenter.sh_nodepools.yaml")
    names = [f"--filename={file}" for file in files]
    bare_cluster.kubectl("apply", "--server-side", *names)
    bare_cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
    yield bare_cluster
    bare_cluster.kubectl("delete", "--wait=false", *names)


def check(server: Cluster, text: str) -> list[str]:
    """Return the objects that the server would make of a text. Unknown fields and broken rules are errors."""
    done = server.kubectl(
        "create", "--dry-run=server", "--validate=strict", "--namespace=default", "-o", "name", "-f", "-", input=text
    )
    return done.split()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dialect", ["dra", "kueue", "karpenter"])
def test_the_server_takes_what_is_printed(server: Cluster, dialect: str, name: str) -> None:
    given = dict(SETTINGS[name])
    text = tilecast.advise(given.pop("model"), **given).write_dialect(dialect)  # type: ignore[arg-type]
    if "kind:" in text:
        assert len(check(server, text)) == text.count("\nkind: ")
    else:
        assert (dialect, name) == ("karpenter", "devices"), "no instance type is known"


@pytest.mark.parametrize(
    ("dialect", "right", "wrong"),
    [
        ("dra", "firstAvailable", "firstPossible"),
        ("dra", "lowerAscii", "lowerCase"),
        ("kueue", "TryNextFlavor", "TryAnother"),
        ("karpenter", "weight: 100", "weight: 101"),
    ],
)
def test_the_server_refuses_what_is_wrong(server: Cluster, dialect: str, right: str, wrong: str) -> None:
    text = tilecast.advise("gpt2", seq=1024, batch=64, gpus="p5.48xlarge:1,l4:8").write_dialect(dialect)
    assert right in text
    with pytest.raises(ClusterError):
        check(server, text.replace(right, wrong))
