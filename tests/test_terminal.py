"""On a terminal: progress with the time left, and colours. In a pipe, with NO_COLOR and with --quiet: nothing more."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tilecast.cli import main, progress, screen

ROOT = Path(__file__).resolve().parent.parent
RUN = """import sys
from tilecast.cli import main, progress
progress.PATIENCE_S = 0.0
sys.exit(main(sys.argv[1:]))"""
"""Program that runs the command line, and shows a bar at once."""
SMALL = ["gpt2", "--seq", "1024", "--batch", "64", "--gpus", "l4:8"]
LONG = {
    "sweep": [*SMALL, "--over", "pool.gpus=4..8"],
    "scan": ["examples/scan", "--gpus", "h100-sxm:16", "--exit-zero"],
    "queue": ["queue.yaml", "--gpus", "h100-sxm:8"],
    "validate runs": ["runs.csv"],
}
RUNS = """id,gpu,n_gpus,precision,model_name,seq_len,global_batch,step_time_s_derived,dp,zero_stage
monday,a100-80,8,bf16,llama-2-7b,4096,64,17.9,8,3
"""
QUEUE = """apiVersion: tilecast.dev/v1alpha1
kind: TrainingJob
metadata: {name: one}
spec:
  model: {preset: gpt2}
  training: {sequenceLength: 1024, globalBatchSize: 64, steps: 1000}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "queue.yaml").write_text(QUEUE)
    (folder / "runs.csv").write_text(RUNS)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def on_terminal(folder: Path, *words: str, is_piped: bool = False, **environment: str) -> tuple[str, str]:
    """Run a command on a terminal. Return what the terminal got, and what the pipe at standard output got if any."""
    inner, outer = pty.openpty()
    got = list[bytes]()

    def read() -> None:
        try:
            while block := os.read(inner, 1 << 16):
                got.append(block)
        except OSError:  # Linux's end of a terminal
            pass

    reader = threading.Thread(target=read)
    reader.start()
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], stdin=subprocess.DEVNULL, stderr=outer,
        stdout=subprocess.PIPE if is_piped else outer, cwd=folder, env={"TERM": "xterm", **known, **environment},
        check=False,
    )  # fmt: skip
    os.close(outer)
    reader.join()
    os.close(inner)
    text = b"".join(got).decode().replace("\r\n", "\n")
    assert done.returncode == 0, text
    return text, (done.stdout or b"").decode()


@pytest.mark.slow
@pytest.mark.parametrize("verb", LONG)
def test_long_work_shows_its_progress_on_a_terminal_alone(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*verb.split(), *LONG[verb]]
    shown, printed = on_terminal(folder, *words, is_piped=True)
    assert re.search(r"\d+/\d+", shown) and "left" in shown, "how far, and the time left"
    assert "\x1b" not in printed, "no colours in a pipe"
    quiet, same = on_terminal(folder, *words, "--quiet", is_piped=True)
    assert quiet == "" and same == printed
    monkeypatch.chdir(folder)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    assert main(words) == 0
    assert capfd.readouterr() == (printed, ""), "nothing in a pipe"


@pytest.mark.slow
def test_a_terminal_has_colours_unless_no_color_says_otherwise(folder: Path) -> None:
    words = ["advise", *SMALL, "--baseline", "l4:8"]
    shown, _ = on_terminal(folder, *words)
    lines = shown.splitlines()
    (best,) = [line for line in lines if "1x" in line and line.startswith("\x1b[1;32m>")]
    assert best.endswith("\x1b[0m")
    assert [line for line in lines if line.startswith("\x1b[36m=")]
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain, _ = on_terminal(folder, *words, **environment)
        assert "\x1b[" not in plain and re.sub(r"\x1b\[[\d;]*m", "", shown) == plain
    assert "\x1b[1;32m" in on_terminal(folder, *words, NO_COLOR="")[0], "an empty NO_COLOR is none"
    assert "\x1b" not in on_terminal(folder, *words, "-o", "json")[0]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_colours_mark_has_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = """! the network is assumed
>  h100-sxm  2x8  may not fit (86 of 78 GiB)
=  l4        1x8
x  t4        no BF16 units
> recommended; x cannot run the job
h100-sxm  tight    16  tp4
l4        no           tp8
3 of 5 GPU jobs would be cheaper elsewhere
0 of 5 GPU jobs would be cheaper elsewhere
2 were not read, and are not guessed:
3 do not run as they are
llama ends 5min late
"""
    painted = screen.color_text(text, _Terminal())
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == text
    assert re.findall(r"\x1b\[([1-9][\d;]*)m([^\x1b]*)", painted) == [
        ("33", "! the network is assumed"),
        ("1;32", ">  h100-sxm  2x8  may not fit (86 of 78 GiB)"),
        ("36", "=  l4        1x8"),
        ("31", "x  t4        no BF16 units"),
        ("33", "tight"),
        ("31", "no"),
        ("1;32", "3 of 5 GPU jobs would be cheaper"),
        ("33", "2 were not read"),
        ("31", "do not run"),
        ("31", "llama ends 5min late"),
    ]
    assert screen.color_text(text, io.StringIO()) == text


def test_an_error_stands_on_a_clean_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["sweep", "gpt2", "--seq", "1024", "--batch", "64", "--gpus", "l4:8", "--over", "nothing=1"]) == 2
    assert re.sub(r"\x1b\[[\d;]*\w", "", terminal.getvalue().splitlines()[-1]).startswith("tilecast: --over: ")
    assert "\x1b[1;31mtilecast:" in terminal.getvalue()


@pytest.mark.parametrize("words", [["--quiet", "runs", "x.csv"], ["runs", "x.csv", "--quiet"], ["runs", "x.csv"]])
def test_quiet_may_stand_before_and_behind_what_is_validated(words: list[str]) -> None:
    from tilecast.cli import build_parser

    assert build_parser(["validate"]).parse_args(["validate", *words]).quiet == ("--quiet" in words)


def test_quiet_keeps_errors_and_leaves_warnings_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "gpt2", "--seq", "1k", "--batch", "1M", "--gpus", "l4:8"]
    main(words)
    assert "tilecast:" in capsys.readouterr().err
    main([*words, "--quiet"])
    assert capsys.readouterr().err == ""
    assert main(["advise", "gpt2", "--quiet", "--gpus", "nothing:1"]) == 2
    assert capsys.readouterr().err.startswith("tilecast: ")


def test_quiet_may_stand_before_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", "show", "links"]) == 0
    before = capsys.readouterr().out
    assert main(["show", "links", "--quiet"]) == 0
    assert before == capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--quiet"])
    assert "VERB: is missing" in capsys.readouterr().err
