"""A thousand random TrainingJobs (ten thousand in `make test`), most of them hostile and some plausible.

Each is advised or refused with a reason, at little cost, and nothing crashes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from operator_store import JOBS, QUICK, Store, job, node, operator, ready, settled
from tilecast import untrusted
from tilecast.advice import Advice, Request, advise
from tilecast.hardware import Pool
from tilecast_operator import main  # noqa: F401 - it lets as many levels through as the API server does
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.metrics import Metrics
from tilecast_operator.report.advice import MAX_BYTES

CRD = yaml.safe_load((Path(__file__).resolve().parent.parent / "crds" / "trainingjobs.yaml").read_text())
SCHEMA: dict[str, Any] = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
ANSWER_S = 120.0
STATUS_BYTES = 32 * 1024

HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**400,
    -(10**400),
    0.1,
    1e308,
    math.nan,
    math.inf,
    "",
    " ",
    "\x00",
    "\x1b[2J\r\n",
    "\u202egnp.exe",
    "\ud800",
    "\ufeff",
    "💣" * 1000,
    "a" * 70_000,
    "../../etc/passwd",
    "!!python/object/apply:os.system ['true']",
    "{{7*7}}${7*7}",
    "*anchor",
    "1e400",
    "NaN",
    [],
    [[[[[]]]]],
    ["x"] * 1000,
    {},
    {"": ""},
    {"\n": "\t"},
    {"__class__": "x", "$ref": "#"},
    {str(number): number for number in range(1000)},
]
"""Values that replace another value, or that an unknown key gets."""

VALID = st.fixed_dictionaries(
    {
        "model": st.sampled_from([{"preset": "gpt2"}, {"preset": "bert-large"}]),
        "training": st.fixed_dictionaries(
            {
                "sequenceLength": st.sampled_from([128, 512]),
                "globalBatchSize": st.sampled_from([1, 8, 1000]),
                "precision": st.sampled_from(["fp16", "bf16"]),
            }
        ),
    },
    optional={
        "mode": st.sampled_from(["Advise", "Off"]),
        "objective": st.sampled_from(["time", "cost"]),
        "constraints": st.sampled_from([{"gpus": 1}, {"gpus": 3}, {"allowedPools": ["t4"]}, {"allowedPools": ["x"]}]),
    },
)
"""Jobs that are priced; few distinct ones, because each costs a search."""


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that the API server would accept for a schema, apart from its CEL rules."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            required = schema.get("required", ())
            fields = {name: values_of(child) for name, child in schema["properties"].items()}
            return st.fixed_dictionaries(
                {name: fields[name] for name in required},
                optional={name: field for name, field in fields.items() if name not in required},
            )
        case "object":
            child = schema.get("additionalProperties")
            inner = values_of(child) if isinstance(child, dict) else st.sampled_from(HOSTILE)
            return st.dictionaries(
                st.sampled_from(["model_type", "n_layer", "hidden_size", "é", "$"]), inner, max_size=3
            )
        case "array":
            return st.lists(values_of(schema["items"]), max_size=min(schema.get("maxItems", 3), 3))
        case "integer" | "number" as kind:
            low, high = schema.get("minimum", 0), schema.get("maximum", 2**62)
            near = st.sampled_from([low, min(low + 1, high), high])
            between = st.integers(int(low), int(high)) if kind == "integer" else st.floats(low, high)
            return near | between
        case "boolean":
            return st.booleans()
        case "string":
            return st.sampled_from(["gpt2", "llama-2-7b", "t4", "h100-sxm", "nobody"]).filter(
                lambda text: schema.get("minLength", 0) <= len(text) <= schema.get("maxLength", 63)
            )
        case _:
            return st.sampled_from(HOSTILE)


@st.composite
def spoiled(draw: st.DrawFn, specs: st.SearchStrategy[dict[str, Any]]) -> Any:
    """Draw a spec in which one value is replaced, removed, or given an unknown neighbour."""
    spec = json.loads(json.dumps(draw(specs), default=str))
    place, parent, key = spec, None, None
    while isinstance(place, dict) and place and draw(st.integers(0, 3)):
        parent, key = place, draw(st.sampled_from(sorted(place)))
        place = place[key]
    hostile = draw(st.sampled_from(HOSTILE))
    if parent is None:
        return draw(st.sampled_from([hostile, {**spec, "unknown": hostile}]))
    match draw(st.sampled_from(["replaced", "removed", "neighbour"])):
        case "replaced":
            parent[key] = hostile
        case "removed":
            del parent[key]
        case _:
            parent[draw(st.sampled_from(["unknown", "Preset", "\x1b", ""]))] = hostile
    return spec


SPECS = st.one_of(VALID, values_of(SCHEMA["spec"]), spoiled(VALID), spoiled(values_of(SCHEMA["spec"])))


class Fuzzed(Store):
    """A store that sets `answered` once a job has its status."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = asyncio.Event()

    async def apply(self, path: str, document: Any, **options: Any) -> dict[str, Any]:
        answer = await super().apply(path, document, **options)
        if path.endswith("/status"):
            self.answered.set()
        return answer


def prove_sane(job: dict[str, Any]) -> str:
    """Check the answer of a job, and return its reason.

    An answer has a reason, matches the schema and stays within its size limits.
    """
    state = ready(job)
    assert state["status"] in ("True", "False")
    assert (state["status"] == "True") == ("recommendation" in job["status"])
    assert state["reason"] != "InternalError", state["message"]
    assert 0 < len(state["message"]) <= 1024
    assert state["message"].isprintable(), state["message"]
    assert len(json.dumps(job["status"])) < STATUS_BYTES
    notes = {key: value for key, value in job["metadata"]["annotations"].items() if key.startswith("tilecast.dev/")}
    assert sum(len(key.encode()) + len(value.encode()) for key, value in notes.items()) <= MAX_BYTES
    return str(state["reason"])


@pytest.mark.parametrize("examples", [300, pytest.param(3_000, marks=pytest.mark.long)])
@pytest.mark.slow
def test_fuzzed_jobs_are_advised_or_refused_with_a_reason(examples: int) -> None:
    reasons, seen = Counter[str](), set[str]()
    status_schema = jsonschema.Draft202012Validator(SCHEMA["status"])

    async def answer(running: OperatorParts, store: Fuzzed, number: int, spec: Any) -> None:
        path = f"{JOBS}/{number}"
        store.answered.clear()
        body = job(str(number))
        body["spec"] = spec
        running.cache.put_object(store.put(path, body))
        async with asyncio.timeout(ANSWER_S):
            await store.answered.wait()
        advised = store.objects.pop(path)
        reason = prove_sane(advised)
        reasons[reason] += 1
        text = json.dumps(advised["status"].get("recommendation"), sort_keys=True) + reason
        if text not in seen:
            seen.add(text)
            status_schema.validate(advised["status"])
        running.cache.remove_object(advised)

    loop = asyncio.new_event_loop()
    store = Fuzzed()

    async def begin() -> OperatorParts:
        running = OperatorParts(QUICK, store, Metrics(), advise)
        running.cache.put_object(node(product="Tesla-T4"))
        store.node_count = 1
        running.start()
        return running

    running = loop.run_until_complete(begin())

    @hypothesis_settings(
        max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(SPECS)
    def fuzz(spec: Any) -> None:
        loop.run_until_complete(answer(running, store, sum(reasons.values()), spec))

    try:
        fuzz()
    finally:
        loop.run_until_complete(running.stop())
        loop.close()
    assert sum(reasons.values()) >= examples
    assert reasons["Advised"] > examples // 50 and reasons["InvalidSpec"] > examples // 10, reasons
    assert running.metrics.registry.get_sample_value("tilecast_retries_total") == 0
    searches = running.metrics.registry.get_sample_value("tilecast_advice_duration_seconds_count")
    assert searches is not None and searches < examples // 4 and searches < 500, "equal workloads are priced once"


GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}


def deep(levels: int) -> Any:
    return json.loads('{"a":' * levels + "1" + "}" * levels)


OVERGROWN = {
    "1 MB in one value": {**GPT2, "pad": "x" * 2**20},
    "1 MB in many values": {**GPT2, "pad": ["x"] * 2**18},
    "200 levels": {**GPT2, "pad": deep(200)},
    "as deep as the API server takes": untrusted.empty_containers_below(deep(9_990)),
    "hostile keys": {"\x00\x1b[2J\u202e" * 100: "!!python/object/apply:os.system"},
}


@pytest.mark.parametrize("config", OVERGROWN.values(), ids=OVERGROWN.keys())
@pytest.mark.slow
async def test_an_overgrown_manifest_is_refused_without_a_search(config: dict[str, Any]) -> None:
    store, asked = Store(), list[str]()

    def counting(request: Request, pools: Sequence[Pool]) -> Advice:
        asked.append(request.name)
        return advise(request, pools)

    store.put(f"{JOBS}/a", {**job(), "spec": {**job()["spec"], "model": {"huggingFace": {"config": config}}}})
    async with operator(store, counting) as running:
        await settled(running)
    answer = store.objects[f"{JOBS}/a"]
    assert prove_sane(answer) == "InvalidSpec"
    assert "spec.model.huggingFace.config" in ready(answer)["message"]
    assert len(json.dumps(answer["status"])) < 4096
    assert store.writes == [("apply", f"{JOBS}/a/status")]
    assert asked in ([], ["warm-up"])
