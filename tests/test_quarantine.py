"""An object at which the operator dies is set aside at the next start, and all others are answered."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from doomed_operator import HONEST
from operator_store import JOBS, Store, job, on_first_pool, operator, ready, settled
from tilecast_operator.kube.journal import Journal
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.quarantine import EVERYTHING, FIRST_S, MOST_S, DeathRecord, Quarantine, add_deaths
from tilecast_operator.objects.kinds import KINDS
from tilecast_operator.objects.quarantine import digest_user_content, make_minimal_job, open_quarantine
from tilecast_operator.objects.tables import Cache

BOMB, HONEST_JOB, NODE = Key("TrainingJob", "a", "bomb"), Key("TrainingJob", "b", "honest"), Key("Node", "", "n1")
HERE = Path(__file__).parent
MOST_DEATHS = 8
"""Twice the expected deaths: at the first death each of two deadly jobs is read beside others, then alone."""


@pytest.mark.long
def test_the_operator_dies_a_few_times_then_everybody_is_answered(tmp_path: Path) -> None:
    result, statuses, log = tmp_path / "result.json", list[int](), ""
    while not result.exists():
        assert len(statuses) <= MOST_DEATHS, (statuses, log)
        done = subprocess.run(
            [sys.executable, str(HERE / "doomed_operator.py"), str(tmp_path), str(result)],
            capture_output=True,
            text=True,
            check=False,
        )
        statuses.append(done.returncode)
        log += done.stderr
    assert set(statuses[:-1]) == {-signal.SIGSEGV} and statuses[-1] == 0
    outcome = json.loads(result.read_text())
    assert outcome["answers"] == {f"honest-{number}": "Advised" for number in range(HONEST)} | {
        "bomb": "InputQuarantined"
    }
    assert outcome["applied"] == "InputQuarantined", "a held job is let go as it is"
    assert outcome["counted"] == {"Job": 1.0, "TrainingJob": 1.0}
    assert {("bomb", "InputQuarantined"), ("held", "InputQuarantined")} <= {tuple(item) for item in outcome["events"]}
    assert "name='bomb') was being read when the last process died" in log


def test_an_object_is_set_aside_at_the_death_at_which_it_alone_can_be_to_blame() -> None:
    alone = add_deaths({}, [BOMB], 0.0)
    assert alone[BOMB] == DeathRecord(1, 0.0, FIRST_S)
    several = add_deaths({}, [BOMB, HONEST_JOB], 0.0)
    assert several[BOMB].until_s == several[HONEST_JOB].until_s == 0.0
    again = add_deaths(several, [BOMB, HONEST_JOB], 60.0)
    assert again[BOMB].until_s == again[HONEST_JOB].until_s == 0.0, "one of them may be honest"
    last = add_deaths(again, [BOMB], 120.0)
    assert last[BOMB].until_s > 120.0 and last[HONEST_JOB].until_s == 0.0
    forgotten = add_deaths(several, [BOMB, NODE], 2 * 86_400.0)
    assert forgotten[BOMB].until_s == 0.0 and HONEST_JOB not in forgotten


def test_the_wait_grows_and_a_namespace_of_many_such_objects_is_set_aside_as_a_whole() -> None:
    records: dict[Key, DeathRecord] = {}
    now_s, waits = 0.0, []
    for _ in range(6):
        records = add_deaths(records, [BOMB], now_s)
        waits.append(records[BOMB].until_s - now_s)
        now_s = records[BOMB].until_s
    assert waits[0] == FIRST_S and waits == sorted(waits) and waits[-1] == MOST_S
    records = {}
    for number in range(3):
        assert Key(EVERYTHING, "a") not in records or not records[Key(EVERYTHING, "a")].until_s
        records = add_deaths(records, [Key("Job", "a", f"bomb-{number}")], float(number))
    assert records[Key(EVERYTHING, "a")].until_s > 0.0


def body(key: Key, batch: Any = 8, **metadata: Any) -> dict[str, Any]:
    meta = {"name": key.name, "uid": "u", "resourceVersion": "7", **metadata}
    meta |= {"namespace": key.namespace} if key.namespace else {}
    return {"apiVersion": "tilecast.dev/v1alpha1", "kind": key.kind, "metadata": meta, "spec": {"training": batch}}


def test_what_is_set_aside_is_read_again_when_it_changes_or_after_its_time(tmp_path: Path) -> None:
    now_s = 1000.0

    def quarantine(suspects: Sequence[Key]) -> Quarantine:
        return open_quarantine(str(tmp_path), suspects, lambda: now_s)

    first = quarantine([BOMB])
    assert (
        first.find_readable_part(body(HONEST_JOB)) == body(HONEST_JOB)
        and first.find_quarantine_reason(HONEST_JOB) is None
    )
    seen = first.find_readable_part(body(BOMB))
    assert (
        seen is not None
        and seen["spec"] == {}
        and "died while it read this object (1 time" in (first.find_quarantine_reason(BOMB) or "")
    )
    second = quarantine([])
    assert second.find_readable_part(
        body(BOMB, resourceVersion="8", labels={"kueue.x-k8s.io/queue-name": "q"})
    ) != body(BOMB)
    assert second.find_quarantine_reason(BOMB), "it is remembered, and what others write of it changes nothing"
    changed = body(BOMB, 16)
    assert second.find_readable_part(changed) == changed and second.find_quarantine_reason(BOMB) is None
    third = quarantine([BOMB])
    third.find_readable_part(changed)
    third.find_readable_part(body(BOMB, 24))
    assert third.find_quarantine_reason(BOMB), "at the second death in a row a change alone is not enough"
    assert third.list_due_keys() == []
    now_s += FIRST_S
    assert third.list_due_keys() == [BOMB] and third.find_readable_part(body(BOMB, 24)) == body(BOMB, 24)
    third.remove_object(BOMB)
    assert quarantine([]).find_readable_part(body(BOMB)) == body(BOMB), "one that is gone is forgotten"


def test_what_is_set_aside_is_walked_without_recursion() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    hostile = {**body(BOMB, deep), "status": {"parts": deep}}
    assert digest_user_content(hostile) == digest_user_content(hostile) != digest_user_content(body(BOMB))
    note = {
        "metadata": {"name": "a", "annotations": {"tilecast.dev/training": "[" * 500, "tilecast.dev/mode": "Initial"}}
    }
    seen = make_minimal_job({**hostile, **note, "spec": {"suspend": True, "template": deep}})
    assert seen["metadata"]["annotations"] == {"tilecast.dev/mode": "Initial"}
    assert (seen["spec"], seen["status"]) == ({"suspend": True}, {})
    while deep != 1:  # otherwise it is freed recursively
        deep = deep.pop()


def test_objects_of_other_kinds_are_left_out_and_the_rest_of_the_cluster_is_seen() -> None:
    cache = Cache(quarantine=open_quarantine("", [NODE], lambda: 0.0))
    for name in ("n1", "n2"):
        cache.put_object(
            {"kind": "Node", "metadata": {"name": name, "uid": name, "resourceVersion": "1"}, "status": {}}
        )
    assert list(cache.nodes) == [Key("Node", "", "n2")]


async def test_a_journal_holds_what_a_step_reads_and_nothing_while_it_waits(tmp_path: Path) -> None:
    journal, go_on = Journal(str(tmp_path), KINDS), asyncio.Event()

    def noted() -> tuple[Key, ...]:
        """Return the suspects that a process would read from the journal if it started now."""
        copy = tmp_path / "copy"
        copy.mkdir(exist_ok=True)
        (copy / "journal").write_bytes((tmp_path / "journal").read_bytes())
        return Journal(str(copy), KINDS).suspects

    async def work() -> tuple[Key, ...]:
        await go_on.wait()
        with journal.record_reading(NODE):
            assert noted() == (NODE,)
        assert await asyncio.to_thread(journal.call_recorded, noted) == (HONEST_JOB,)
        return noted()

    async def doomed() -> None:
        try:
            await go_on.wait()
        finally:
            assert noted() == (BOMB,)

    task = asyncio.ensure_future(asyncio.wait_for(journal.await_recorded(HONEST_JOB, work()), 60))
    cancelled = asyncio.ensure_future(asyncio.wait_for(journal.await_recorded(BOMB, doomed()), 60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert noted() == ()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    go_on.set()
    assert await task == (HONEST_JOB,)
    with journal.record_reading(NODE):
        assert noted() == (NODE,)
        journal.close()
        assert noted() == (), "a process that ends in order leaves no suspect"


async def test_a_suspect_is_read_while_nothing_else_is(tmp_path: Path) -> None:
    suspects, others = [BOMB, NODE], [Key("Job", "a", f"honest-{number}") for number in range(3)]
    journal, together = Journal(str(tmp_path), KINDS), list[frozenset[Key]]()
    journal.isolate(suspects)

    def note() -> None:
        """Record what is read at this moment and a little later, as the next process would find it."""
        for _ in range(2):
            with tempfile.TemporaryDirectory() as copy:
                (Path(copy) / "journal").write_bytes((tmp_path / "journal").read_bytes())
                together.append(frozenset(Journal(copy, KINDS).suspects))
            time.sleep(0.001)

    async def work() -> None:
        for _ in range(10):
            note()
            await asyncio.to_thread(journal.call_recorded, note)

    async with asyncio.timeout(60):
        await asyncio.gather(*(journal.await_recorded(key, work()) for key in (*suspects, *others)))
    for suspect in suspects:
        assert {keys for keys in together if suspect in keys} == {frozenset({suspect})}
    assert any(len(keys) > 1 for keys in together), "others are read at the same time"


async def test_a_suspect_that_is_cancelled_while_it_waits_keeps_nobody_waiting() -> None:
    journal, began, go_on = Journal("", KINDS), threading.Event(), threading.Event()
    journal.isolate([BOMB])

    def read() -> None:
        began.set()
        go_on.wait(60)

    async def work() -> None:
        await asyncio.to_thread(journal.call_recorded, read)

    honest = asyncio.ensure_future(journal.await_recorded(HONEST_JOB, work()))
    await asyncio.to_thread(began.wait, 60)
    suspect = asyncio.ensure_future(journal.await_recorded(BOMB, asyncio.sleep(0)))
    await asyncio.sleep(0.05)
    assert not suspect.done()
    suspect.cancel()
    with pytest.raises(asyncio.CancelledError):
        await suspect
    await asyncio.wait_for(journal.await_recorded(Key("Job", "a", "b"), asyncio.sleep(0)), 60)
    go_on.set()
    await honest


async def test_a_suspect_that_is_read_inside_another_object_keeps_nobody_waiting() -> None:
    journal = Journal("", KINDS)
    journal.isolate([BOMB])

    async def work() -> None:
        with journal.record_reading(BOMB):
            pass

    await journal.await_recorded(HONEST_JOB, work())
    await asyncio.wait_for(journal.await_recorded(NODE, asyncio.sleep(0)), 60)


async def test_a_suspect_stays_alone_while_any_thread_reads_it() -> None:
    journal, began, go_on = Journal("", KINDS), threading.Event(), threading.Event()
    journal.isolate([BOMB])

    def read() -> None:
        began.set()
        go_on.wait(60)

    suspect = asyncio.ensure_future(journal.await_recorded(BOMB, asyncio.to_thread(journal.call_recorded, read)))
    await asyncio.to_thread(began.wait, 60)
    with journal.record_reading(BOMB):
        pass  # an event of the suspect, which is read beside the thread after a while
    honest = asyncio.ensure_future(journal.await_recorded(HONEST_JOB, asyncio.sleep(0)))
    await asyncio.sleep(0.05)
    assert not honest.done()
    go_on.set()
    await suspect
    await asyncio.wait_for(honest, 60)


async def test_a_job_that_was_set_aside_is_answered_once_it_is_read_again(tmp_path: Path) -> None:
    store = Store()
    store.put(f"{JOBS}/a", job("a"))
    store.clock_s = 1000.0
    key = Key("TrainingJob", "default", "a")
    notes = Journal(str(tmp_path), KINDS)
    with notes.record_reading(key):
        (tmp_path / "next").mkdir()
        (tmp_path / "next" / "journal").write_bytes((tmp_path / "journal").read_bytes())
    async with operator(store, on_first_pool, journal=str(tmp_path / "next")) as running:
        await settled(running)
        state = ready(store.objects[f"{JOBS}/a"])
        assert (state["status"], state["reason"]) == ("False", "InputQuarantined")
        assert "1970-01-01T00:26:40Z" in state["message"]
        changed = job("a", objective="cost")
        running.cache.put_object(store.put(f"{JOBS}/a", changed))
        await settled(running)
        assert ready(store.objects[f"{JOBS}/a"])["reason"] == "Advised"
