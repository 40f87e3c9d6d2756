"""What the command line answers where its arguments cannot be parsed: one line with a remedy."""

from __future__ import annotations

import shlex

import pytest

from tilecast.cli import main

JOB = ("advise", "gpt2", "--seq=1024", "--batch=64")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["advise"], "job: is missing; for instance `tilecast advise llama"),
        (["trace"], "TARGET, -o/--output: are missing; for instance `tilecast trace model.onnx"),
        (["calibrate"], "RUNS.csv or --nccl-tests: is missing; for instance `tilecast calibrate RUNS.csv"),
        (["advice"], "VERB: 'advice' is not allowed; did you mean advise?"),
        (["show", "gpu"], "what: 'gpu' is not allowed; did you mean gpus?"),
        ([*JOB, "--precision=int8"], "--precision: 'int8' is not allowed; use one of fp32, tf32,"),
        ([*JOB, "--framework=megatorn"], "--framework: 'megatorn' is not allowed; did you mean megatron?"),
        ([*JOB, "--tokns=3"], "--tokns=3: is no argument; did you mean --tokens?"),
        ([*JOB, "--batch-size", "8"], "--batch-size 8: is no argument; did you mean --batch?"),
        ([*JOB, "--seq-length=8"], "--seq-length=8: is no argument; did you mean --seq?"),
        ([*JOB, "l4:8"], "l4:8: is no argument; leave it out"),
        ([*JOB, "--gpus"], "--gpus: has no value; write --gpus GPU:N,…"),
        ([*JOB, "--objective"], "--objective: has no value; write --objective time|cost|"),
        ([*JOB, "--gpus=l4:8", "--nodes=x.yaml"], "--nodes: is given beside --gpus; give one of them"),
        ([*JOB, "--max=4"], "ambiguous option: --max=4 could match --max-gpus, --max-nodes"),
    ],
)
def test_arguments_that_cannot_be_parsed(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    screen = capsys.readouterr()
    assert screen.err.startswith(f"tilecast: {answer}")
    assert screen.err.count("\n") == 1
    assert not screen.out


@pytest.mark.parametrize("verb", ["advise", "fits", "sweep", "queue", "trace", "validate", "learning", "completion"])
def test_the_example_of_a_verb_parses(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tilecast.cli import build_parser

    with pytest.raises(SystemExit):
        main([verb])
    example = shlex.split(capsys.readouterr().err.split("`")[1])
    assert example[:2] == ["tilecast", verb]
    build_parser([verb]).parse_args(example[1:])


@pytest.mark.slow
def test_show_alone_lists_what_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show"]) == 2
    commands = [line.split("  ")[0].split()[1:] for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in commands] == ["gpus", "gpus", "models", "links", "pools"]
    for words in commands:
        assert main(words) == 0, words


def test_a_baseline_may_be_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--gpus=l4:8", "--baseline=a10g:4"]) == 0
    apart = capsys.readouterr().out
    assert "Assumed of your baseline: a10g 1 node of 4" in apart
    assert main([*JOB, "--gpus=l4:8,a10g:4", "--baseline=a10g:4"]) == 0
    (own,), (other,) = (
        [line for line in text.splitlines() if line[:1] == "="] for text in (apart, capsys.readouterr().out)
    )
    assert own.split() == other.split()
    assert main([*JOB, "--gpus=l4:8", "--baseline=t44:4"]) == 2
    assert capsys.readouterr().err.startswith("tilecast: --baseline: there is no pool or GPU 't44'; did you mean")
