"""Namespaces of strict clusters, on real kubelets: the operator runs under users that the image does not know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import Cluster
from kind_cluster import ChartRelease, installed
from story import TEAM, Scene

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

USER = 1_000_650_000
"""A user id such as OpenShift gives each namespace, with the group 0."""


@pytest.fixture(scope="module")
def strict(kind_cluster: Cluster) -> Iterator[ChartRelease]:
    """Yield a release under another user, in a namespace that enforces the Restricted Pod Security Standard."""
    user = {"runAsUser": USER, "runAsGroup": 0}
    with installed(kind_cluster, "strict", {"podSecurityContext": user}) as release:
        yield release


def test_it_runs_as_a_user_that_the_image_does_not_know(strict: ChartRelease) -> None:
    (pod,) = strict.pods()
    name = pod["metadata"]["name"]
    assert strict.kubectl("exec", name, "--", "id", "-u").strip() == str(USER)
    assert "Phase:          Succeeded" in strict.helm("test")
    team = Scene(strict.cluster.kubectl, lambda: "", "")
    strict.cluster.kubectl("create", "namespace", TEAM)
    try:
        team.apply("asked-a-strange-user")
    finally:
        strict.cluster.kubectl("delete", "namespace", TEAM)
    log = strict.kubectl("logs", strict.deployment)
    assert "is forbidden" not in log and "Traceback" not in log
