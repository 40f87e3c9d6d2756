"""Words of the first screen that fresh readers took for something else."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from tilecast import zoo
from tilecast.cli import main
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.reading import parse_deadline, parse_seconds
from tilecast.spec import SpecError, Workload

LLAMA = ("advise", "llama-3.1-8b", "--seq", "8192", "--batch", "128")
IMAGES = ("advise", "resnet-50", "--batch", "512")


def screen(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(list(words))
    return " ".join(capsys.readouterr().out.split())


def test_a_line_explains_the_marks_that_appear(capsys: pytest.CaptureFixture[str]) -> None:
    alone = screen(capsys, *LLAMA, "--gpus", "h100-sxm:12")
    assert "> recommended; ~ the usual plan; 3x4: 3 parts of nodes with 4 GPUs each; -o wide" in alone
    assert "your baseline" not in alone and "cannot run the job" not in alone
    every = screen(capsys, *IMAGES, "--gpus", "l4:8,t4:8", "--baseline", "l4:4")
    assert "= your baseline; x cannot run the job; 1x8: 1 node with 8 GPUs" in every


def test_a_baseline_without_a_plan_says_which_plan_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ("--gpus", "h100-sxm:16", "--baseline")
    some = screen(capsys, *LLAMA, *gpus, "h100-sxm:8")
    assert "your baseline, plan assumed" in some and "Your baseline on 8 h100-sxm, if it runs " in some
    whole = screen(capsys, *LLAMA, *gpus, "h100-sxm:8:fsdp8,mb2,ac-full")
    assert "plan assumed" not in whole and "Your baseline on 8 h100-sxm takes " in whole


def test_tight_memory_says_what_is_needed_and_what_may_be_taken(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("advise", "llama-3-70b", "--seq", "4096", "--batch", "256", "--objective", "cost")
    text = screen(capsys, *job, "--gpus", "h100-sxm:100")
    assert re.search(r"may not fit \(\d+ of 78 GiB\)", text) and "It may not fit: of 78.3 GiB it needs " in text
    assert "% price (memory to spare may cost 2%)" in text
    assert " needs " in text.partition("Why not")[2] and "exceeds" not in text


def test_only_models_with_attention_have_a_note_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Assumed: attention" in screen(capsys, *LLAMA, "--gpus", "h100-sxm:8")
    assert "Assumed: attention" not in screen(capsys, *IMAGES, "--gpus", "l4:8")
    for name, has in (("vit-b-16", True), ("resnet-50", False)):
        assert zoo.runs_fused_attention(Workload(zoo.find_preset(name), 1, 8)) is has


def test_a_stated_link_is_not_told_as_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    guessed = screen(capsys, *LLAMA, "--gpus", "h100-sxm:16")
    assert "infiniband-ndr-8x400 between, priced as gd-8xh100ib-i128." in guessed
    stated = screen(capsys, *LLAMA, "--gpus", "h100-sxm:16@infiniband-ndr-8x400")
    assert "nvlink4 inside. Give --nodes" in stated and "priced as" not in stated


def test_notes_on_a_bare_model_name_flags(capsys: pytest.CaptureFixture[str]) -> None:
    text = screen(capsys, *IMAGES, "--gpus", "l4:8")
    assert "state it as --input-samples-per-second" in text and "inputSamplesPerSecond" not in text


def test_a_measured_plan_is_not_recommended_with_recomputation(capsys: pytest.CaptureFixture[str]) -> None:
    measured = "h100-sxm:8/zero2-dp4,cp2,mb1=25s"
    text = screen(capsys, *LLAMA, "--gpus", "h100-sxm:8", "--measured", measured)
    assert "zero2-dp4,cp2,mb1,ac" not in text.partition("Why not")[0]


def test_a_measured_step_alone_asks_which_run_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--gpus", "h100-sxm:8", "--measured", "12s"]) == 2
    assert "12 s does not say of which GPUs and plan it is; write POOL:N=STEP" in capsys.readouterr().err


def test_a_deadline_may_be_a_date() -> None:
    end = datetime.now(UTC) + timedelta(days=3)
    left = parse_deadline(end.isoformat(timespec="seconds"))
    assert 3 * 86400 - 60 <= left <= 3 * 86400
    date = f"{end:%Y-%m-%d}"
    assert left - 86400 <= parse_deadline(date) <= left
    assert parse_deadline("2w") == parse_seconds("14d") == 14 * 86400
    for text, problem in (("2001-01-01", "has passed"), ("2030-13-01", "cannot read"), ("2030-01-01T99", "cannot")):
        with pytest.raises(SpecError, match=problem):
            parse_deadline(text, "--finish-by")


@pytest.mark.parametrize("flag", ["--deadline", "--deadline-seconds", "--finish-by"])
def test_an_error_names_the_flag_that_was_typed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--gpus", "h100-sxm:16", flag, "2001-01-01"]) == 2
    assert capsys.readouterr().err.startswith(f"tilecast: {flag}: 2001-01-01 has passed")
    with pytest.raises(SpecError, match=f"{flag}: 2001"):
        JobOptions.from_values(None, {flag.strip("-").replace("-", "_"): "2001-01-01"})


def test_finish_by_is_a_name_of_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    date = f"{datetime.now(UTC) + timedelta(days=30):%Y-%m-%d}"
    job = (*LLAMA, "--gpus", "h100-sxm:16", "--tokens", "1B", "--objective", "fewestGpusBeforeDeadline")
    assert main([*job, "--deadline", "1h", "--finish-by", date]) == 0
    assert "objective: fewestGpusBeforeDeadline" in capsys.readouterr().out
