"""The page of `tilecast web`: its answers, what it refuses, and how it stands abuse and a browser."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import urlencode

import aiohttp
import pytest

from browser import DESK, PHONE, open_browser
from tilecast.cli import main
from tilecast.inputs.job_options import JOB_OPTIONS
from tilecast.spec import SpecError
from tilecast.web import answers, server
from tilecast.web.answers import DEFAULTS, MAIN_OPTIONS, MORE_OPTIONS, Form, write_answer
from tilecast.web.form_answers import parse_form
from tilecast.web.page import EXAMPLE, write_page, write_style

SMALL = Form(model="gpt2", seq="1024", batch="64", gpus="l4:8")
CONFIG = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
COMMAND = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 \\
  --bf16 --vocab-size 50257"""


def test_a_preset_is_answered_with_all_sections() -> None:
    shown = write_answer(SMALL)
    for words in ("<h2>gpt2</h2>", "Time, cost and GPUs", "Pools", "Where the time goes", "Take it with you"):
        assert words in shown
    assert "<h1" not in shown and "<script" not in shown


def test_a_pasted_config_and_a_pasted_command_are_models() -> None:
    shown = write_answer(Form(pasted=json.dumps(CONFIG), seq="1024", batch="64", gpus="l4:8"))
    assert "gpt2" in shown and "--seq 1024 --batch 64 --gpus l4:8" in shown
    shown = write_answer(Form(pasted=COMMAND, gpus="h100-sxm:8"))
    assert "Megatron" in shown and "-- torchrun --nproc-per-node 8 pretrain_gpt.py" in shown


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (Form(gpus="l4:1"), "model"),
        (Form(model="gtp2", gpus="l4:1"), "model"),
        (Form(model="/etc/passwd", gpus="l4:1"), "model"),
        (Form(model="gpt2", gpus="l4:1", batch="8"), "seq"),
        (Form(model="gpt2", gpus="l4:1"), "batch and seq"),
        (Form(model="gpt2", gpus="/etc/passwd", batch="8", seq="8"), "gpus"),
        (Form(model="gpt2", gpus="l4:1", batch="many", seq="8"), "batch"),
        (Form(pasted="{", gpus="l4:1"), "pasted"),
        (Form(pasted="echo 'open", gpus="l4:1"), "pasted"),
    ],
)
def test_an_error_names_the_field_of_the_form(form: Form, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        write_answer(form)
    assert field in caught.value.field


@pytest.mark.parametrize(
    "pasted",
    [
        "bash /etc/passwd",
        "torchrun pretrain_gpt.py $(cat /etc/passwd)",
        "deepspeed train.py --deepspeed_config /etc/passwd",
        "accelerate launch --config_file /etc/hostname train.py",
        "torchrun train.py --model_name_or_path /root",
    ],
)
def test_a_pasted_command_reads_no_file(pasted: str) -> None:
    with pytest.raises(SpecError) as caught:
        write_answer(Form(pasted=pasted, gpus="l4:1", batch="8", seq="8"))
    assert "root:" not in str(caught.value)


def test_an_answer_is_computed_in_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object) -> None:
        Path("/etc/hostname").read_text()

    monkeypatch.setattr(answers, "compute_advice", read)
    with pytest.raises(SpecError, match="file: is a file, and this page reads none"):
        write_answer(SMALL)


def test_an_error_about_a_pasted_text_says_what_the_page_can_take() -> None:
    pasted = (
        "torchrun --nproc-per-node 8 train.py --fsdp full_shard --fsdp_config fsdp.json --per_device_train_batch_size 1"
    )
    with pytest.raises(
        SpecError, match=r"^fsdp\.json: is a file, and this page reads none; paste its text as --file too"
    ):
        write_answer(Form(pasted=pasted, gpus="l4:8", seq="1024"))
    with pytest.raises(SpecError) as caught:
        write_answer(Form(pasted="echo one\necho two\n", gpus="l4:8"))
    assert answers.describe_error(caught.value) == "script: holds no launch line; paste the command itself"


def test_a_model_of_the_hub_is_refused_without_a_path_of_the_machine() -> None:
    pasted = "trl sft --model_name_or_path Foo/Bar --max_length 1024 --per_device_train_batch_size 1"
    with pytest.raises(SpecError) as caught:
        write_answer(Form(pasted=pasted, gpus="l4:1", batch="8", seq="1024"))
    assert "Hub" in str(caught.value) and "/root" not in str(caught.value) and ".cache" not in str(caught.value)


def test_what_is_copied_gives_the_same_advice(capsys: pytest.CaptureFixture[str]) -> None:
    shown = write_answer(SMALL)
    command = SMALL.write_command().split()
    assert main([*command[1:], "-o", "json"]) == 0
    best = json.loads(capsys.readouterr().out)["recommendation"]
    assert f"<strong>{best['pool']}, {best['nodes']} x {best['gpusPerNode']} GPUs</strong>" in shown
    exec(SMALL.write_python(), {})  # noqa: S102 (our own text)
    assert ">  l4" in capsys.readouterr().out
    assert "kind: TrainingJob" in shown


def test_names_that_look_like_markup_stay_text() -> None:
    hostile = '"><script>alert(1)</script>'
    page = write_page(Form(*([hostile] * len(fields(Form)))))
    assert "<script>" not in page and page.count("<script") == 1
    with pytest.raises(SpecError) as caught:
        write_answer(Form(model=hostile, gpus="l4:1"))
    assert "<script" not in server.write_error(str(caught.value))


SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
MODEL=llama-3.1-8b
GPUS=8
torchrun --nnodes=2 --nproc_per_node $GPUS run_clm.py --model_name_or_path $MODEL --bf16 \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --block_size 4096 --fsdp full_shard
"""


def test_a_pasted_script_with_variables_is_read() -> None:
    form = Form(pasted=SCRIPT, gpus="h100-sxm:16")
    shown = write_answer(form)
    assert "Read as Transformers Trainer" in shown and "on 16 GPUs" in shown
    assert form.write_command() == "tilecast advise job.sh --gpus h100-sxm:16"
    assert "command='#!/bin/bash" in form.write_python()
    with pytest.raises(SpecError) as caught:
        write_answer(Form(pasted="source /etc/passwd\ntorchrun $SCRIPT --a $(cat /etc/passwd)\n", gpus="l4:1"))
    assert "root:" not in str(caught.value)


TORCHTITAN = """\
# a comment
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 1
global_batch_size = 64
seq_len = 8192

[parallelism]
tensor_parallel_degree = 2
"""
AXOLOTL = "base_model: gpt2\nmicro_batch_size: 4\ngradient_accumulation_steps: 2\nsequence_len: 1024\nbf16: true\n"


@pytest.mark.parametrize(
    ("pasted", "said", "file"),
    [(TORCHTITAN, "Read as torchtitan: dp=8,tp=2", "job.toml"), (AXOLOTL, "Read as axolotl", "job.yaml")],
)
def test_a_pasted_configuration_is_read(pasted: str, said: str, file: str) -> None:
    form = Form(pasted=pasted, gpus="h100-sxm:16")
    assert said in write_answer(form)
    assert form.write_command() == f"tilecast advise {file} --gpus h100-sxm:16"


NAMES_FILE = (
    "#!/bin/bash\n#SBATCH --nodes=1\ntorchrun --nproc-per-node 8 run_clm.py --model_name_or_path gpt2 "
    "--block_size 1024 --per_device_train_batch_size 1 --fsdp full_shard --fsdp_config conf/fsdp.json\n"
)


def test_a_file_that_a_script_names_can_be_pasted_too() -> None:
    form = Form(pasted=NAMES_FILE, gpus="l4:8")
    with pytest.raises(SpecError, match=r"^conf/fsdp\.json: is a file") as caught:
        write_answer(form)
    assert "A file that it names\N{RIGHT DOUBLE QUOTATION MARK} too" in answers.describe_error(caught.value)
    nodes = write_answer(replace(form, pasted=NAMES_FILE.replace("--nodes=1", "--gpus-per-node=8"), file="{}"))
    assert "--gpus" not in nodes.split("Take it with you")[0], "a field of the page"
    for own, said in (("true", "zero=3,mb=1,ac=full on 8 GPUs"), ("false", "zero=3,mb=1 on 8 GPUs")):
        shown = write_answer(replace(form, file='{"activation_checkpointing": ' + own + ', "note": "END"}'))
        assert "Your file was read as conf/fsdp.json." in shown and said in shown
    unused = write_answer(Form(pasted=COMMAND, gpus="h100-sxm:8", file="{}"))
    assert "The file that you pasted was not needed." in unused


AXOLOTL = (
    "base_model: Qwen/Qwen2.5-0.5B\nmicro_batch_size: 1\nsequence_len: 1024\nbf16: true\n"
    "deepspeed: ds.json  # ZeRO\ngradient_accumulation_steps: 1\n"
)
ZERO = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}\n'


def test_a_pasted_configuration_may_name_a_file() -> None:
    """The page once asked for the text of the file, and then took the configuration for a shell script."""
    form = Form(pasted=AXOLOTL, gpus="h100-sxm:8")
    with pytest.raises(SpecError, match=r"^ds\.json: is a file"):
        write_answer(form)
    shown = write_answer(replace(form, file=ZERO))
    assert "Your file was read as ds.json." in shown and "zero=3" in shown


@pytest.mark.parametrize("name", ["~/ds.json", "'my dir/ds.json'", "../ds.json", "ds.json.bak", "/a/ds.json"])
def test_a_file_may_have_any_path(name: str) -> None:
    """A name with a tilde or a folder with a space was once not found in what was pasted."""
    command = (
        "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-0.5B --per_device_train_batch_size 1 "
        f"--max_length 1024 --bf16 --run_name ds.json.bak2 --deepspeed {name}"
    )
    shown = write_answer(Form(pasted=command, gpus="h100-sxm:8", file=ZERO))
    assert f"Your file was read as {name.strip(chr(39))}." in shown


def test_an_error_about_an_option_of_a_configuration_keeps_its_name() -> None:
    form = Form(pasted='[model]\nname = "llama3"\n[training]\nlocal_batch_size = 1\n', gpus="h100-sxm:8")
    with pytest.raises(SpecError) as caught:
        write_answer(form)
    said = answers.describe_error(caught.value)
    assert said == "configuration.toml: model.flavor: is missing; name it in what you paste"


def test_the_bounds_of_yaml_are_said_once() -> None:
    bomb = "".join(f"b{level}: &b{level} [{', '.join([f'*b{level - 1}'] * 10)}]\n" for level in range(1, 9))
    form = Form(pasted=f"base_model: x\nmicro_batch_size: 1\nb0: &b0 [1]\n{bomb}", gpus="h100-sxm:8")
    with pytest.raises(SpecError, match=r"^configuration\.yaml: means more than 100,000 values") as caught:
        write_answer(form)
    assert "cannot mean" not in str(caught.value)


def test_caveats_prices_and_how_to_read_a_plan_stand_beside_the_answer() -> None:
    shown = write_answer(Form(model="llama-3.1-8b", gpus="h100-sxm:16", seq="8192", batch="16", framework="fsdp2"))
    for text in ("How sure?", "Prices per GPU and hour: h100-sxm $", "How a plan reads", "may run out of memory"):
        assert text in shown, text
    assert "Safer: zero" in shown


def test_a_choice_that_is_left_open_says_what_it_means() -> None:
    page = write_page(EXAMPLE)
    assert ">default<" not in page and ">default (bf16)<" in page
    assert {name for name in (*MAIN_OPTIONS, *MORE_OPTIONS) if JOB_OPTIONS[name].choices} == DEFAULTS.keys()


def test_texts_of_the_page_name_its_fields() -> None:
    """Notes and errors named flags of the command line, which the page does not have."""
    shown = write_answer(Form(model="llama-3.1-8b", gpus="h100:8", seq="4096", batch="64", lora_rank="16"))
    said = shown.split("Take it with you")[0]
    assert not re.findall(r"(?<![\w(-])--[a-z]+", re.sub(r"<svg.*?</svg>", "", said, flags=re.DOTALL))
    assert "--nodes FILE" not in shown
    own = write_answer(Form(pasted=f"{COMMAND} --optimizer adam", gpus="h100-sxm:8")).split("Take it with you")[0]
    assert "Change: add --use-distributed-optimizer" in own, "options of a launcher stay"
    with pytest.raises(SpecError) as caught:
        write_answer(Form(model="gpt2", gpus="l4:1"))
    assert answers.describe_error(caught.value) == (
        "Global batch and Sequence length: are missing; add for instance Global batch 128 Sequence length 8192"
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpus": ""}, "GPU pools: is missing; write for instance h100-sxm:16,a100-80:2x8"),
        ({"model": "llama99"}, "Model: unknown model 'llama99'; the field lists them as you type"),
        ({"quantization": "nf4"}, "Frozen weights under LoRA: needs LoRA rank, since"),
        ({"framework_version": "1.2"}, "name the framework, or leave Version of the framework out"),
    ],
)
def test_an_error_has_no_name_that_the_page_has_not(changed: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        write_answer(replace(SMALL, **changed))  # type: ignore[arg-type]
    assert said in answers.describe_error(caught.value)


def test_the_length_of_a_run_adapters_and_limits_are_fields() -> None:
    form = Form(
        model="llama-3.1-8b", gpus="h100-sxm:8", seq="4096", batch="64", steps="1000", lora_rank="16", max_gpus="4"
    )
    shown, page = write_answer(form), write_page(form)
    assert "--steps 1000 --lora-rank 16 --max-gpus 4" in shown and "lora_rank=16" in shown
    assert "h100-sxm, 1 x 4 GPUs" in shown and "a step, 1,000 steps; objective" in shown
    assert '<details class="whole" open>' in page and '<details class="whole">' in write_page(Form())
    assert all(f'name="{item.name}"' in page for item in fields(Form))


def test_a_form_that_is_too_long_is_refused() -> None:
    with pytest.raises(SpecError, match="paste less"):
        Form.from_values({"pasted": "x" * 50_000})
    # The body of a request was once said to be no form.
    with pytest.raises(SpecError, match="paste less"):
        parse_form(urlencode({"pasted": "x" * 50_000}).encode())
    assert Form.from_values({"other": "x", "model": " gpt2 "}) == Form(model="gpt2")


def test_the_page_without_pictures_is_small() -> None:
    script = Path(server.__file__).parent / "static" / "page.js"
    assert len(write_page(EXAMPLE)) + len(write_style()) + script.stat().st_size < 60_000
    assert len(write_answer(SMALL)) < 240_000


def test_a_bad_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["web", "--port", "99999"]) == 2
    assert capsys.readouterr().err == "tilecast: --port: 99999 is no port; write a number from 1 to 65535\n"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "tilecast", "web", "--port", str(port)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline().startswith(b"http://127.0.0.1:")
    for _ in range(300):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


async def post(session: aiohttp.ClientSession, url: str, data: object, **headers: str) -> tuple[int, str]:
    async with session.post(url, data=data, headers=headers) as response:
        return response.status, await response.text()


@pytest.mark.slow
async def test_two_hundred_requests_at_once_are_answered_or_refused(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        forms = [{"model": "gpt2", "seq": "1024", "batch": str(index % 4 + 1), "gpus": "l4:2"} for index in range(200)]
        found = await asyncio.gather(*(post(session, f"{address}/answer", form) for form in forms))
        statuses = [status for status, _ in found]
        assert set(statuses) <= {200, 503} and 200 in statuses
        assert (await post(session, f"{address}/answer", forms[0]))[0] == 200, "it goes on"


@pytest.mark.slow
async def test_what_a_stranger_sends_is_bounded(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        status, text = await post(session, f"{address}/answer", {"pasted": "x" * (1 << 20)})
        assert status == 400 and "paste less" in text
        status, text = await post(session, f"{address}/answer", b"\xff\xfe")
        assert status == 400
        status, text = await post(session, f"{address}/answer", {"model": "<b>x</b>", "gpus": "l4:1"})
        assert status == 400 and "<b>" not in text
        status, _ = await post(session, f"{address}/answer", {}, Host="elsewhere.example")
        assert status == 400, "a name that another page could use"
        async with session.get(address) as response:
            policy = response.headers["Content-Security-Policy"]
            assert "script-src 'self'" in policy and "default-src 'none'" in policy
            page = await response.text()
    assert re.findall(r"<script(.*?)</script>", page) == [' src="page.js" defer>']
    assert not re.search(r"\son\w+=", page), "no script in an attribute"


@pytest.mark.slow
async def test_a_slow_client_does_not_stop_others(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    _, slow = await asyncio.open_connection(host, int(port))
    slow.write(b"POST /answer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nmodel=")
    await slow.drain()
    async with aiohttp.ClientSession() as session:
        assert (await post(session, f"{address}/", {"model": "gpt2", "seq": "512", "batch": "8", "gpus": "l4:1"}))[
            0
        ] == 200
    slow.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "light"), (PHONE, "dark"), (DESK, "light"), (DESK, "dark")])
async def test_a_browser_asks_without_leaving_the_page(address: str, width: int, scheme: str, tmp_path: Path) -> None:
    async with open_browser(tmp_path) as browser:
        await browser.set_window(width, scheme)
        await browser.show(f"{address}/")
        values = urlencode({"model": "gpt2", "seq": "1024", "batch": "64", "gpus": "l4:8"})
        await browser.evaluate(
            f"for (const [name, value] of new URLSearchParams('{values}')) "
            "document.querySelector(`[name=${name}]`).value = value;"
            "document.querySelector('button[type=submit]').click()"
        )
        await browser.wait_for("document.querySelector('#answer h2')?.textContent === 'gpt2'")
        assert await browser.evaluate("location.pathname") == "/"
        assert await browser.evaluate("document.querySelectorAll('#answer svg').length") >= 3
        names = "[...document.querySelectorAll('input,select,textarea')].every(one => one.labels.length === 1)"
        assert await browser.evaluate(names), "every field has a label"
        asked = await browser.evaluate("performance.getEntriesByType('resource').map(one => new URL(one.name).host)")
        assert set(asked) == {address.removeprefix("http://")}, "no request beyond this machine"
        assert not await browser.find_faults()
        sizes = (
            "[...document.querySelectorAll('#answer svg.chart')].map(one => parseFloat(getComputedStyle(one).fontSize) "
            "* one.getBoundingClientRect().width / one.viewBox.baseVal.width)"
        )
        assert min(await browser.evaluate(sizes)) > 10, "the text of pictures can be read"
        paste = "const field = document.querySelector('[name=pasted]'); field.value = 'torchrun train.py';"
        await browser.evaluate(f"{{ {paste} field.dispatchEvent(new Event('input')); }}")
        cleared = "['seq', 'batch'].map(name => document.querySelector(`[name=${name}]`).value).join()"
        assert await browser.evaluate(cleared) == "1024,64", "what the user wrote stays"
        await browser.show(f"{address}/")
        await browser.evaluate(f"{{ {paste} field.dispatchEvent(new Event('input')); }}")
        assert await browser.evaluate(cleared) == ",", "what the page wrote gives way to the pasted text"
        config = paste.replace("'torchrun train.py'", """'{"model_type": "gpt2"}'""")
        await browser.evaluate(f"{{ {config} field.dispatchEvent(new Event('input')); }}")
        assert await browser.evaluate(cleared) == f"{EXAMPLE.seq},{EXAMPLE.batch}", "a config says neither"
