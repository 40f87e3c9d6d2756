"""`tilecast mcp` before a client of the protocol, the tools behind it, and what they may touch."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from mcp import Client, StdioServerParameters

import tilecast
from tilecast.cli import main
from tilecast.inputs.job_options import JOB_OPTIONS
from tilecast.public import api, tools
from tilecast.public.confinement import Permissions, confine
from tilecast.spec import SpecError

ROOT = Path(__file__).resolve().parent.parent
SMALL: dict[str, Any] = {"model": "gpt2", "seq": 1024, "batch": 64, "gpus": "l4:8,h100-sxm:8"}
NODES = ROOT / "examples" / "clusters" / "mixed.yaml"


@asynccontextmanager
async def connected(*flags: str) -> AsyncIterator[Client]:
    arguments = ["-m", "tilecast", "mcp", *flags]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ), cwd=ROOT)
    async with Client(server) as client:
        yield client


async def ask(client: Client, tool: str, **given: Any) -> tuple[str, Any]:
    """Return the text and the JSON of an answer that is no error."""
    answer = await client.call_tool(tool, given)
    assert not answer.is_error, answer.content
    return answer.content[0].text, answer.structured_content  # type: ignore[union-attr]


async def refused(client: Client, tool: str, **given: Any) -> str:
    """Return the one line of an error."""
    answer = await client.call_tool(tool, given)
    assert answer.is_error
    assert answer.structured_content is None
    text: str = answer.content[0].text  # type: ignore[union-attr]
    assert "\n" not in text
    return text


@pytest.mark.slow
async def test_a_client_gets_the_json_and_the_table_of_the_command_line() -> None:
    async with connected() as client:
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("tilecast", tilecast.__version__)
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(listed) == ["advise", "forecast", "fits", "queue", "pools"]
        for tool in listed.values():
            assert tool.annotations is not None
            assert tool.annotations.read_only_hint
            jsonschema.Draft202012Validator.check_schema(tool.input_schema)
            assert "context" not in tool.input_schema["properties"], "no context was allowed"

        whole = tilecast.advise(**SMALL)
        assert await ask(client, "advise", **SMALL) == (str(whole), whole.to_dict())
        text, document = await ask(client, "forecast", **SMALL | {"gpus": "l4:8", "plan": "dp=8"})
        assert (document["pool"], document["parallelism"]["data"]) == ("l4", 8)
        assert "step_seconds" in text
        fits = tilecast.fits(**SMALL)
        assert await ask(client, "fits", **SMALL) == (str(fits), fits.to_dict())
        text, document = await ask(client, "pools", gpus={"h100-sxm": 16})
        assert document["pools"][0]["GPU"] == "h100-sxm"
        assert text.splitlines()[1].startswith("h100-sxm")
        job = {
            "apiVersion": "tilecast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "one"},
            "spec": {
                "model": {"preset": "gpt2"},
                "training": {"sequenceLength": 1024, "globalBatchSize": 64, "steps": 9},
            },
        }
        text, document = await ask(client, "queue", jobs=[job], gpus="l4:8")
        assert "one" in json.dumps(document["jobs"])
        assert "one" in text


@pytest.mark.slow
async def test_errors_are_one_line_and_the_server_goes_on() -> None:
    async with connected() as client:
        assert (await refused(client, "advise", model="gpt2", sequ=1)).startswith(
            "sequ: is no argument of advise; did you"
        )
        assert (await refused(client, "advise", model="gpt2", gpus="l4:1")).startswith("batch and seq: are missing")
        assert (await refused(client, "advise", **SMALL | {"seq": [1]})).startswith("seq: should be a valid integer")
        assert (await refused(client, "advise", **SMALL | {"precision": "fp1"})).startswith("precision: ")
        assert (await refused(client, "queue", gpus="l4:1")) == "jobs: is missing; see the schema of queue"
        assert (await refused(client, "train")).startswith("tool: 'train' is not known; known: advise")
        assert (await refused(client, "pools", context="prod")).startswith("context: is not allowed to this server")
        assert (await refused(client, "pools", gpus="h1000:1")).startswith("gpus")
        assert (await ask(client, "pools", gpus="l4:1"))[1]["pools"]


@pytest.mark.slow
async def test_a_client_reads_only_what_the_user_allows(tmp_path: Path) -> None:
    hidden = "is outside the folders that this server may read; start it with --read FOLDER"
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "nodes.yaml").write_bytes(NODES.read_bytes())
    (inside / "link.yaml").symlink_to(NODES)
    (tmp_path / "job.sh").write_text("torchrun train.py --secret 1\n")
    async with connected() as client:
        assert hidden in await refused(client, "pools", nodes=str(NODES))
        assert hidden in await refused(client, "advise", model="/etc/passwd", gpus="l4:1")
        assert hidden in await refused(client, "queue", jobs=str(ROOT / "examples" / "queue"), gpus="l4:1")
        assert hidden in await refused(client, "advise", **SMALL, measured="@/etc/passwd")
        assert "passwd" not in await refused(client, "advise", **SMALL, nodes="-")
    async with connected("--read", str(inside)) as client:
        assert len((await ask(client, "pools", nodes=str(inside / "nodes.yaml")))[1]["pools"]) == 4
        assert hidden in await refused(client, "pools", nodes=str(inside / "link.yaml"))
        assert hidden in await refused(client, "pools", nodes=str(inside / ".." / "job.sh"))


@pytest.mark.slow
async def test_a_context_is_asked_only_if_the_user_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\n[ "$2" = mine ] || [ "$1" = "--context=mine" ] || exit 9\ncat {tmp_path}/list.json\n'
    )
    kubectl.chmod(0o755)
    (tmp_path / "list.json").write_text(json.dumps(yaml.safe_load(NODES.read_text()), default=str))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with connected("--context", "mine") as client:
        (advise, *_) = (await client.list_tools()).tools
        assert advise.input_schema["properties"]["context"]["enum"] == ["mine"]
        assert len((await ask(client, "pools", context="mine"))[1]["pools"]) == 4
        assert "context: is not allowed" in await refused(client, "pools", context="other")


# The tools without a server


def test_arguments_are_those_of_the_python_api() -> None:
    described = tools.list_tools()
    second_names = {alias for option in JOB_OPTIONS.values() for alias in option.aliases}
    own = {"advise": {"plan", "baseline", "measured", "launcher"}, "forecast": {"plan", "measured"}, "fits": {"plan"}}
    for name, extra in own.items():
        settings = set(api.JobSettings.__annotations__) - second_names - {"inputs"}
        assert set(described[name].arguments) == {"model", *settings, *extra}
    for name, tool in described.items():
        for argument, schema in tool.write_schema()["properties"].items():
            assert schema.get("description"), f"{name} {argument}"
            if argument in JOB_OPTIONS and JOB_OPTIONS[argument].choices:
                assert schema["enum"] == list(JOB_OPTIONS[argument].choices or ())


@pytest.mark.parametrize("name", ["advise", "fits"])
def test_null_is_the_same_as_left_out(name: str) -> None:
    tool = tools.list_tools()[name]
    nothing = dict.fromkeys(tool.arguments)
    assert tools.call_tool(name, nothing | SMALL) == tools.call_tool(name, SMALL)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("forecast", {}, "model: is missing; name a preset"),
        ("advise", {"seq": 8, "batch": 8, "gpus": "l4:1"}, "model: is missing; name a preset"),
        ("fits", {"model": None}, "model: is missing; name a preset"),
        ("fits", SMALL | {"model": ""}, "model: is empty; leave it out"),
        ("advise", SMALL | {"launcher": " "}, "launcher: is empty; leave it out"),
        ("advise", SMALL | {"calibration": "a\0b"}, "calibration: has a zero byte"),
        ("advise", SMALL | {"calibration": "a\nb"}, "a b: "),
        ("advise", SMALL | {"model": "x" * 100_000}, "model.preset: unknown model 'xxx"),
        ("advise", SMALL | {"baseline": "x" * 100_000}, "baseline: cannot read"),
        ("pools", {"gpus": "x" * 100_000}, "gpus: "),
        ("queue", {"jobs": "a\nb", "gpus": "l4:1"}, "a b: "),
    ],
)
def test_an_argument_that_is_missing_empty_or_huge_is_one_short_line(
    name: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError) as caught:
        tools.call_tool(name, given)
    assert str(caught.value).startswith(said)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000


def test_a_model_that_is_none_is_missing() -> None:
    with pytest.raises(SpecError, match="model: is missing; name a preset"):
        tilecast.forecast(None, seq=1024, batch=8, gpus="l4:1")


def test_warnings_about_the_input_are_lines_of_the_text(tmp_path: Path) -> None:
    given = yaml.safe_load(NODES.read_text())
    given["items"][0]["metadata"]["labels"]["nvidia.com/gpu.product"] = "NVIDIA-X1000"
    text = tools.call_tool("fits", {"model": "gpt2", "seq": 1024, "batch": 64, "nodes": given})[1]
    assert "left out node" in text.splitlines()[-1]


# What a call may touch


def connect() -> None:
    with socket.socket() as one:
        one.connect(("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("act", "meant"),
    [
        (lambda folder: (folder / "a").read_text(), "outside the folders"),
        (lambda folder: Path("/proc/self/environ").read_text(), "outside the folders"),
        (lambda folder: (folder / "b").write_text("x"), "would be changed"),
        (lambda folder: list(folder.iterdir()), "outside the folders"),
        (lambda folder: (folder / "a").unlink(), "would be changed"),
        (lambda folder: (folder / "a").rename(folder / "c"), "would be changed"),
        (lambda folder: subprocess.run(["true"], check=False), "may not be started"),
        (lambda folder: os.system("true"), "may not be started"),  # noqa: S605
        (lambda folder: connect(), "network: is not allowed"),
    ],
)
def test_nothing_outside_is_read_changed_started_or_connected_to(act: Any, meant: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("secret")
    with pytest.raises(SpecError, match=meant), confine(Permissions()):
        act(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["a"], "and it was not done"


def test_a_refusal_that_code_took_for_its_own_error_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("secret")
    with pytest.raises(SpecError, match="outside the folders"), confine(Permissions()):
        try:
            (tmp_path / "a").read_text()
        except ValueError:
            raise KeyError("a") from None


def test_an_allowed_folder_is_read_and_other_threads_are_free(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    seen = list[str]()
    with confine(Permissions(folders=(tmp_path.resolve(),))):
        assert (tmp_path / "a").read_text() == "x"
        with pytest.raises(SpecError, match="would be changed"):
            (tmp_path / "b").write_text("y")
        other = threading.Thread(target=lambda: seen.append(NODES.read_text()[:1]))
        other.start()
        other.join()
    assert seen
    assert NODES.read_text()


@pytest.mark.slow
def test_without_the_package_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['mcp'] = None; from tilecast.cli import main; sys.exit(main(['mcp']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tilecast: mcp: needs the package mcp, which is not installed; pip install 'tilecast[mcp]'\n"


def test_a_folder_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "--read", "/nowhere"]) == 2
    assert capsys.readouterr().err == "tilecast: --read: /nowhere is no folder; name a folder that exists\n"


# The skill


def commands() -> Sequence[str]:
    text = (ROOT / "skills" / "tilecast" / "SKILL.md").read_text()
    fences = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for fence in fences for line in fence.splitlines() if line]


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_skill_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command)
    assert program == "tilecast"
    assert main(arguments) == 0
    assert capsys.readouterr().out


def test_the_skill_has_a_name_and_says_when_to_use_it() -> None:
    head, body = (ROOT / "skills" / "tilecast" / "SKILL.md").read_text().removeprefix("---\n").split("\n---\n", 1)
    facts = yaml.safe_load(head)
    assert facts["name"] == "tilecast"
    assert 100 < len(facts["description"]) <= 1024
    for tool in tools.list_tools():
        assert f"`{tool}`" in body
