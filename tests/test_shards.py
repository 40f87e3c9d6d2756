"""Several operators share the namespaces of a cluster: one answers each job, and one writes the pools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from operator_store import POOLS, Store, job, operator, settled
from tilecast.spec import SpecError
from tilecast_operator import settings as settings_module
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.selector import LabelSelector

FIELD = "TILECAST_NAMESPACE_SELECTOR"
A = json.dumps({"matchLabels": {"shard": "a"}})
REST = json.dumps({"matchExpressions": [{"key": "shard", "operator": "NotIn", "values": ["a"]}]})


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ({"matchLabels": {"shard": "a"}}, ["a"]),
        ({"matchExpressions": [{"key": "shard", "operator": "In", "values": ["a", "b"]}]}, ["a", "b"]),
        ({"matchExpressions": [{"key": "shard", "operator": "NotIn", "values": ["a"]}]}, ["b", ""]),
        ({"matchExpressions": [{"key": "shard", "operator": "Exists"}]}, ["a", "b"]),
        ({"matchExpressions": [{"key": "shard", "operator": "DoesNotExist"}]}, [""]),
        ({"matchLabels": {"shard": "a"}, "matchExpressions": [{"key": "x", "operator": "Exists"}]}, []),
    ],
)
def test_a_selector_selects_what_kubernetes_says(selector: dict[str, Any], selected: list[str]) -> None:
    parsed = LabelSelector.from_json(json.dumps(selector), FIELD)
    assert parsed is not None
    assert [name for name in ("a", "b", "") if parsed.selects({"shard": name} if name else {})] == selected


def test_no_selector_is_everything() -> None:
    assert LabelSelector.from_json("", FIELD) is LabelSelector.from_json("{}", FIELD) is None


@pytest.mark.parametrize(
    "text", ["shard=a", "[]", '{"labels": {}}', '{"matchExpressions": [{"key": "a", "operator": "Is"}]}']
)
def test_what_is_no_selector_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        settings_module.from_environment({FIELD: text})
    assert caught.value.field.startswith(FIELD) and "\n" not in str(caught.value)


class NamespaceStore(Store):
    """A store that also lists the TrainingJobs of a namespace in full."""

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        if path.endswith("/trainingjobs") and "/namespaces/" in path:
            return {
                "items": [body for name, body in self.objects.items() if name.startswith(f"{path}/")],
                "metadata": {},
            }
        return await super().get(path, query)

    def add(self, namespace: str, name: str) -> dict[str, Any]:
        body = job(name)
        body["metadata"]["namespace"] = namespace
        return self.put(self.path(namespace, name), body)

    @staticmethod
    def path(namespace: str, name: str) -> str:
        return f"/apis/tilecast.dev/v1alpha1/namespaces/{namespace}/trainingjobs/{name}"

    def is_answered(self, namespace: str, name: str) -> bool:
        return "status" in self.objects[self.path(namespace, name)]


def namespace(running: OperatorParts, name: str, version: int, **labels: str) -> None:
    metadata = {"name": name, "uid": name, "resourceVersion": str(version), "labels": labels}
    running.cache.put_object({"kind": "Namespace", "metadata": metadata})


async def test_each_job_is_answered_by_one_shard_and_pools_are_written_by_one() -> None:
    store = NamespaceStore()
    for place in ("left", "right"):
        for name in "ab":
            store.add(place, name)
    async with operator(store, namespace_selector=REST, discovery=True, owns_pools=False) as other:
        await settled(other)
        async with operator(store, namespace_selector=A, discovery=True) as one:
            await settled(one)
            assert not any(path.endswith("status") and "namespaces" in path for _, path in store.writes), (
                "not known yet"
            )
            for running in (one, other):
                namespace(running, "left", 1, shard="a")
                namespace(running, "right", 1)
                await settled(running)
            for place in ("left", "right"):
                for name in "ab":
                    assert [path for _, path in store.writes].count(f"{store.path(place, name)}/status") == 1
            assert sorted(key.namespace for key in one.cache.training_jobs) == ["left", "left"]
            assert sorted(key.namespace for key in other.cache.training_jobs) == ["right", "right"]
            assert [path for _, path in store.writes if path.startswith(POOLS)] == [
                f"{POOLS}/h100-sxm",
                f"{POOLS}/h100-sxm/status",
            ]


async def test_a_namespace_goes_over_with_its_label() -> None:
    store = NamespaceStore()
    async with (
        operator(store, namespace_selector=A) as one,
        operator(store, namespace_selector=REST, owns_pools=False) as other,
    ):
        for running in (one, other):
            namespace(running, "team", 1)
            await settled(running)
            running.cache.put_object(store.add("team", "first"))
            await settled(running)
        assert store.is_answered("team", "first") and not list(one.cache.training_jobs)
        for running in (one, other):
            namespace(running, "team", 2, shard="a")
            await settled(running)
        assert [key.name for key in one.cache.training_jobs] == ["first"] and not list(other.cache.training_jobs)
        second = store.add("team", "second")
        for running in (one, other):
            running.cache.put_object(second)
            await settled(running)
        assert [path for _, path in store.writes].count(f"{store.path('team', 'second')}/status") == 1
