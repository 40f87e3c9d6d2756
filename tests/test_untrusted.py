"""Untrusted text that is too long or too deep is refused before anything walks it, and kills no process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilecast import untrusted
from tilecast.spec import SpecError

TESTS = Path(__file__).resolve().parent
RECURSIVE = """
import copy, json, pickle, sys, threading
from tilecast_operator import main, release
from tilecast_operator.settings import RECURSION_LIMIT

class Shown:
    def __init__(self, value): self.value = value
    def __repr__(self): return repr(self.value)
    def __eq__(self, other): return self.value == other.value

def nested(make):
    value = make(1)
    for _ in range(RECURSION_LIMIT + 1000):
        value = make(value)
    return value

def mapped(value=0):
    return list(map(mapped, [value]))

def generated():
    yield from generated()

WALKS = {
    "json.loads": lambda: json.loads('{"a":' * 20_000),
    "repr": lambda: repr(nested(lambda value: {"a": [value]})),
    "repr of objects": lambda: repr(nested(Shown)),
    "equality": lambda: nested(Shown) == nested(Shown),
    "json.dumps": lambda: json.dumps(nested(lambda value: {"a": [value]})),
    "pickle": lambda: pickle.dumps(nested(Shown)),
    "deepcopy": lambda: copy.deepcopy(nested(lambda value: [value])),
    "map": mapped,
    "generators": lambda: list(generated()),
}

def walk(where):
    assert sys.getrecursionlimit() == RECURSION_LIMIT
    for name, function in WALKS.items():
        print(where, name, flush=True)
        try:
            function()
        except RecursionError:
            continue
        raise AssertionError(name)
    json.loads("[" * 10_010 + "]" * 10_010)

walk("main")
thread = threading.Thread(target=walk, args=("thread",))
thread.start()
thread.join()
print("done")
"""


def deep(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + "1" + closing * levels


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('{"[[\\"{{":', "}"), ("[ \n", "\t]")])
def test_depth_is_that_of_brackets_outside_of_strings(opening: str, closing: str) -> None:
    for levels in (0, 1, 63, 64, 65, 66, 129, 100_000):
        assert untrusted.is_deeper(deep(levels, opening, closing), 64) == (levels > 64), levels
    assert not untrusted.is_deeper(json.dumps([deep(200, opening, closing)] * 200), 64)
    assert not untrusted.is_deeper("[" + ",".join([deep(63, opening, closing)] * 100) + "]", 64)


def test_text_that_is_no_json_is_never_taken_for_shallow() -> None:
    for text in ("[" * 65, "]" + "[" * 65, '"' + "[" * 65 + '"' + "[" * 65, "[" * 65 + "}" * 65, '["\\\\",' + "[" * 64):
        assert untrusted.is_deeper(text, 64), text
    assert not untrusted.is_deeper('"\\"' + "[" * 65 + '"', 64)


def test_what_lies_too_deep_is_cut_and_the_rest_stays() -> None:
    value = json.loads('{"kept":{"a":[1,"x"]},"deep":' + deep(70) + "}")
    assert untrusted.empty_containers_below(value) is value
    assert json.dumps(value, separators=(",", ":")) == '{"kept":{"a":[1,"x"]},"deep":' + "[" * 64 + "]" * 64 + "}"
    fine = json.loads(deep(64))
    assert untrusted.empty_containers_below(fine) == json.loads(deep(64))
    assert untrusted.empty_containers_below("text") == "text"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (deep(65, '{"a":', "}"), "the value is nested more than 64 levels deep; flatten it"),
        ('{"a":"' + "x" * untrusted.MAX_BYTES + '"}', "the value is longer than 4 MiB"),
        ("[1]", "the value is no JSON mapping; write one"),
        ('{"a":' + "9" * 5000 + "}", "the value is no JSON mapping; write one"),
    ],
)
def test_a_mapping_out_of_bounds_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        untrusted.parse_json_mapping(text, "field", "the value", "write one")
    assert str(error.value).startswith(f"field: {problem}")


def run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    assert done.returncode == 0, f"status {done.returncode} at {last}\n{done.stderr[-2000:]}"


@pytest.mark.slow
def test_the_stack_carries_the_recursion_limit() -> None:
    run("-c", RECURSIVE)


@pytest.mark.parametrize("size", ["fast", pytest.param("long", marks=pytest.mark.long)])
@pytest.mark.slow
def test_no_text_kills_a_process_with_the_operators_settings(size: str) -> None:
    run(str(TESTS / "hostile_doors.py"), size)
