"""Limit and kills of memory, as control groups v2 and v1 tell them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from operator_store import on_first_pool
from tilecast_operator import control_group
from tilecast_operator.search_process import SearchLimits
from tilecast_operator.searches import SearchRunner

V2 = {"memory.max": "805306368\n", "memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"}
V1 = {
    "memory/memory.limit_in_bytes": "805306368\n",
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}


@pytest.mark.parametrize(
    ("files", "limit_bytes", "kills"),
    [
        (V2, 768 << 20, 2),
        (V1, 768 << 20, 2),
        (V2 | {"memory.max": "max\n"}, None, 2),
        (V1 | {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None, 2),
        ({"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, None, 0),
        ({"memory.max": "\xff", "memory.events": "oom_kill\n"}, None, 0),
        ({}, None, 0),
    ],
    ids=["v2", "v1", "v2 unlimited", "v1 unlimited", "old kernel", "unreadable", "none"],
)
def test_limit_and_kills_are_read(
    tmp_path: Path, files: Mapping[str, str], limit_bytes: int | None, kills: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="latin-1")
    assert control_group.read_memory_limit_bytes(tmp_path) == limit_bytes
    assert control_group.count_oom_kills(tmp_path) == kills


@pytest.mark.parametrize(("files", "limit_mib"), [(V2, 768), (V1, 768), (V2 | {"memory.max": "max\n"}, None)])
def test_a_search_that_may_take_more_than_the_container_has_is_told_at_the_start(
    tmp_path: Path,
    files: Mapping[str, str],
    limit_mib: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    monkeypatch.setattr(control_group, "ROOT", tmp_path)
    warned = []
    for memory_mib in (640, 769):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tilecast"):
            SearchRunner(on_first_pool, 1, 1, SearchLimits(memory_mib=memory_mib)).stop()
        warned += caplog.messages
    problem = "TILECAST_SEARCH_MEMORY_MIB: 769 is more than the 768 MiB of this container; lower it, or raise"
    assert [text[: len(problem)] for text in warned] == ([problem] if limit_mib else [])
