"""Restrictions on the PromQL with which the operator asks Prometheus for tenants."""

from __future__ import annotations

import pytest

from operator_store import JOBS, Store, job, operator, settled
from test_observe import status
from tilecast.spec import SpecError
from tilecast_operator.observed.queries import restrict_query

OWN = 'namespace="team"'


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("step_seconds", f"step_seconds{{{OWN}}}"),
        ('avg(step{job="$name"})', f'avg(step{{job="a",{OWN}}})'),
        ("rate(s_sum[5m]) / rate(s_count[5m])", f"rate(s_sum{{{OWN}}}[5m]) / rate(s_count{{{OWN}}}[5m])"),
        ('step{namespace="other"}', f'step{{namespace="other",{OWN}}}'),
        ("quantile(0.5, step)", f"quantile(0.5, step{{{OWN}}})"),
        (r'step{job="a\"}"}', rf'step{{job="a\"}}",{OWN}}}'),
    ],
)
def test_every_selector_is_held_to_the_namespace(query: str, expected: str) -> None:
    assert restrict_query(query, "team", "a") == expected


@pytest.mark.parametrize(
    "query",
    [
        "scalar(sum(secret))", "{__name__=~'.+'}", '{__name__="secret"}', "a or secret", "sum by (x) (a)", "a[5m:1m]",
        "label_replace(a, 'b', 'c', 'd', 'e')", "a # comment", "a{b='c'}", "a{} secret", "a)", "", "a @ 5", "`a`",
        "(" * 30 + "a" + ")" * 30, "a offset 5m", "vector(1)", "sum(a", 'a{b="c}', "a{b=~}",
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_in_one_line(query: str) -> None:
    with pytest.raises(SpecError, match=r"spec\.observationQuery: [^\n]+$"):
        restrict_query(query, "team", "a")


@pytest.mark.parametrize(
    ("allowed", "query", "asked"),
    [("pools", "secret", None), ("jobs", "step", 'step{namespace="default"}'), ("jobs", "scalar(sum(secret))", None)],
)
async def test_a_tenants_query_is_asked_only_where_it_is_allowed(allowed: str, query: str, asked: str | None) -> None:
    """`scalar(sum(secret_business_metric))` was once sent to Prometheus as written, and its value was readable."""
    store = Store()
    store.put(f"{JOBS}/a", job("a", observationQuery=query))
    settings = {"prometheus_url": "http://127.0.0.1:1", "prometheus_poll_s": 1e6, "observation_queries": allowed}
    async with operator(store, **settings) as running:
        await settled(running)
        assert [text for _, text in running.observations.queries()] == ([] if asked is None else [asked])
    (condition,) = (one for one in status(store)["conditions"] if one["type"] == "ObservationsAvailable")
    assert condition["reason"] == ("Refused" if asked is None else "NotObserved")
    assert ("spec.observationQuery" in condition["message"]) == (asked is None)
