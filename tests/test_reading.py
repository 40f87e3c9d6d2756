"""Values of flags: counts with suffixes, batches in tokens, ranges."""

from __future__ import annotations

import warnings

import pytest

from tilecast.inputs.reading import InputWarning, parse_amount, parse_batch, parse_count, parse_number, parse_range
from tilecast.spec import SpecError


@pytest.mark.parametrize(
    ("text", "kilo", "number"),
    [
        ("4096", 1000, 4096),
        ("8k", 1024, 8192),
        ("128K", 1024, 131072),
        ("100k", 1000, 100_000),
        ("1.5M", 1000, 1_500_000),
        ("300B", 1000, 300 * 10**9),
        ("15T", 1000, 15 * 10**12),
        ("1e12", 1000, 10**12),
        ("1_000", 1000, 1000),
        (" 64 ", 1000, 64),
        ("0", 1000, 0),
    ],
)
def test_a_count_is_read(text: str, kilo: int, number: int) -> None:
    assert parse_count(text, "--steps", kilo) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1/2", "8kk", "٨", "inf", "0x10", "1e999", "8 192", "None"])
def test_no_count_is_guessed(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--steps: cannot read .*; write a whole number"):
        parse_count(text, "--steps")


@pytest.mark.parametrize(
    ("text", "sequence", "samples"),
    [
        ("128", 8192, 128),
        ("2k", 8192, 2048),
        ("32k", None, 32768),
        ("1M", None, 2**20),
        ("4Mtokens", 8192, 512),
        ("4M tok", 8192, 512),
        ("0.5Mtokens", 1024, 512),
        ("4Mtokens", 2000, 2000),
        ("8192 tokens", 4096, 2),
    ],
)
def test_a_batch_is_read_as_samples_or_tokens(text: str, sequence: int | None, samples: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_batch(text, "--batch", sequence) == samples


def test_millions_of_samples_with_tokens_are_tokens_and_it_is_said() -> None:
    with pytest.warns(InputWarning, match=r"--batch 4M is read as tokens: 512 samples of 8192; write 4Mtokens"):
        assert parse_batch("4M", "--batch", 8192) == 512


@pytest.mark.parametrize(
    ("text", "sequence", "words"),
    [
        ("5000tokens", 8192, "no whole number of samples of 8192 tokens; write samples, for instance 1"),
        ("4Mtokens", 3000, "for instance 1333"),
        ("4Mtokens", None, "add --seq"),
        ("4Mpixels", 8192, "write samples"),
    ],
)
def test_a_batch_of_part_of_a_sample_is_refused(text: str, sequence: int | None, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_batch(text, "--batch", sequence)
    assert words in str(refused.value)


def test_ranges_numbers_and_amounts_are_read() -> None:
    assert parse_range("256..1k", "--range") == {"min": 256, "max": 1024}
    assert parse_number("6e3", "--rate") == 6000.0
    assert parse_amount("5000EUR") == {"amount": 5000.0, "currency": "EUR"}
    for read, text in ((parse_range, "256"), (parse_range, "..8"), (parse_number, "nan"), (parse_amount, "5 euros")):
        with pytest.raises(SpecError, match=r"^--flag: cannot read"):
            read(text, "--flag")
