"""The chart's on/off values, and lists of settings in which each pair of values meets in all four combinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "charts" / "tilecast"


APART = ("queue.estimates", "jobs.", "podSecurityContext.", "securityContext.", "shard.refuseOthers")


def switches(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield both states of every on/off value below `path`, as `--set` takes them."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from switches(f"{path}.{key}" if path else key, item)
    elif (isinstance(value, bool) or value == "auto") and not path.startswith(APART):
        yield f"{path}=false", f"{path}=true"


SURROUNDINGS = (
    "podSecurityContext.runAsUser=1000660000,extraEnv[0].name=NO_PROXY,extraEnv[0].value=10.0.0.0/8,"
    "extraVolumes[0].name=ca,extraVolumes[0].secret.secretName=ca,extraVolumeMounts[0].name=ca,"
    "extraVolumeMounts[0].mountPath=/authorities"
)
SWITCHES = (
    *switches("", yaml.safe_load((CHART / "values.yaml").read_text())),
    ("jobs.enabled=true", "jobs.enabled=true,jobs.place=true,jobs.gate=true"),
    ("rbac.configMapNamespaces=null", "rbac.configMapNamespaces={team-a,team-b}"),
    ("model.configMap=", f"model.configMap=ours,model.sha256={'ab' * 32}"),
    ("networkPolicy.from=null", "networkPolicy.from[0].namespaceSelector.matchLabels.name=monitoring"),
    ("replicas=1", "replicas=2"),
    ("shard.namespaceSelector=null", "shard.namespaceSelector.matchLabels.shard=a"),
    ("imagePullSecrets=null", "imagePullSecrets[0].name=registry"),
    ("podLabels=null", "podLabels.team=a"),
    ("podSecurityContext.runAsUser=null,extraEnv=null,extraVolumes=null", SURROUNDINGS),
    ("podAnnotations=null", "podAnnotations.team=a"),
    ("priorityClassName=", "priorityClassName=high"),
    ("nodeSelector=null", "nodeSelector.disk=ssd"),
    ("tolerations=null", "tolerations[0].key=gpu,tolerations[0].operator=Exists"),
    ("settings=null", "settings.TILECAST_WRITERS=8,settings.TILECAST_NODE_SELECTOR=gpu"),
    ("fullnameOverride=", f"fullnameOverride={'n' * 63}"),
)


def pairwise(pairs: tuple[tuple[str, str], ...]) -> list[list[str]]:
    """Return eight lists of settings in which any two pairs meet in all four combinations.

    Kleitman and Spencer, 1973: one list has every pair off. Each pair is on in its own choice of four of the other
    seven lists; any two such choices intersect.
    """
    choices = list(combinations(range(1, 8), 4))
    assert len(pairs) <= len(choices)
    return [[pair[row in choice] for pair, choice in zip(pairs, choices, strict=False)] for row in range(8)]
