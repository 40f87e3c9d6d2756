"""Residuals of measured runs, by input and by part of a step, with an effect for every source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import constants
from tilecast_lab.validate import mixed, residuals
from tilecast_lab.validate.constants import scaled_values

ROW = {"source": "a", "url_or_repo_path": "", "framework": "PyTorch 2", "gpu": "A100-SXM4-80GB", "seq_len": "2048"}


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_sources_weigh_alike(names: list[str]) -> None:
    weight = mixed.balanced_weights(names)
    sums = {name: sum(w for w, other in zip(weight, names, strict=True) if other == name) for name in names}
    assert np.ptp(list(sums.values())) == pytest.approx(0.0, abs=1e-9)
    assert weight.mean() == pytest.approx(1.0)


def synthetic(seed: int, rows: int = 400) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return targets, inputs and sources of random rows of ten sources.

    Each source has its own effect, which correlates with the second input.
    """
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 10, rows)
    own = rng.normal(0.0, 0.3, 10)
    x = rng.uniform(0.0, 1.0, (rows, 2))
    x[:, 1] += own[source]
    y = x @ np.array([0.4, -0.2]) + own[source] + rng.normal(0.0, 0.03, rows)
    return y, x, [f"source {number}" for number in source]


@pytest.mark.parametrize("seed", range(5))
def test_effects_are_found_beside_those_of_sources(seed: int) -> None:
    y, x, sources = synthetic(seed)
    effects = mixed.estimate_effects(y, x, sources, mixed.balanced_weights(sources), np.full(2, 5.0))
    assert effects.fixed == pytest.approx([0.4, -0.2], abs=0.05)
    assert (np.abs(effects.fixed - [0.4, -0.2]) < 5 * effects.error).all()
    assert effects.between == pytest.approx(0.3, abs=0.2)
    assert effects.within == pytest.approx(0.03, abs=0.02)


def test_a_few_wild_rows_change_little() -> None:
    y, x, sources = synthetic(7)
    y[:8] += 4.0
    effects = mixed.estimate_effects(y, x, sources, mixed.balanced_weights(sources), np.full(2, 5.0))
    assert effects.fixed == pytest.approx([0.4, -0.2], abs=0.08)


def test_what_no_row_contains_stays_at_its_prior() -> None:
    y, x, sources = synthetic(3)
    x[:, 1] = 0.0
    effects = mixed.estimate_effects(y, x, sources, mixed.balanced_weights(sources), np.full(2, 0.1))
    assert effects.fixed[1] == pytest.approx(0.0, abs=1e-9)
    assert effects.error[1] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "a"),
        ({"url_or_repo_path": "mlcommons/training_results_v5.0:Dell/results/8xH200/ssd"}, "MLPerf v5.0 Dell"),
        ({"source": "Oneflow-Inc/DLPerf", "framework": "MXNet 1.6 (Horovod)"}, "Oneflow-Inc/DLPerf MXNet"),
        (
            {"source": "NVIDIA/DeepLearningExamples", "framework": "TensorFlow2 21.02 NGC"},
            "NVIDIA/DeepLearningExamples TensorFlow",
        ),
    ],
)
def test_a_source_is_who_measured(change: dict[str, str], name: str) -> None:
    assert residuals.source_of({**ROW, **change}) == name


def test_a_framework_is_never_a_submitter_nor_a_word_of_a_source() -> None:
    key = dict(residuals.COVARIATES)["framework"]
    assert key({**ROW, "url_or_repo_path": "mlcommons/training_results_v5.0:Dell/results/8xH200/ssd"}) == "PyTorch 2"
    assert key({**ROW, "source": "a paper of 2023"}) == "PyTorch 2"
    assert key({**ROW, "source": "Oneflow-Inc/DLPerf", "framework": "MXNet 1.6 (Horovod)"}) == "MXNet"


def test_a_bin_is_off_where_two_sources_say_so() -> None:
    rows = [{**ROW, "source": source, "seq_len": str(length)} for length in (2048, 8192) for source in "ab" * 6]
    ratio = np.array([1.0] * 12 + [0.8] * 12)
    bins = {item.value: item for item in residuals.bins(dict(residuals.COVARIATES)["sequence"], rows, ratio)}
    assert (bins["8192"].rows, bins["8192"].sources) == (12, 2)
    assert bins["8192"].ratio == pytest.approx(0.8)
    assert bins["8192"].is_off and not bins["2048"].is_off
    alone = residuals.bins(dict(residuals.COVARIATES)["sequence"], [{**row, "source": "a"} for row in rows], ratio)
    assert not any(item.is_off for item in alone)
    assert "sequence 8192" in residuals.table(rows, ratio)


def test_the_share_of_a_part_is_its_part_of_the_step() -> None:
    """The step has 0.6 s of matrix products and 0.4 s that no constant scales."""
    usual = constants.shipped_constants().factor["matrix"]

    def price(changed: dict[str, float]) -> np.ndarray:
        return np.array([0.6 * changed.get("factor.matrix", usual) / usual + 0.4])

    (share,) = residuals.shares(price, np.ones(1))
    assert share[list(residuals.PARTS).index("matrix")] == pytest.approx(0.6, abs=0.02)
    assert share.sum() == pytest.approx(0.6, abs=0.02)


def test_factors_that_sources_agree_on_are_found() -> None:
    rng = np.random.default_rng(0)
    names = [f"s{number}" for number in rng.integers(0, 8, 300)]
    share = np.zeros((300, len(residuals.PARTS)))
    share[:, 0] = rng.uniform(0.3, 0.9, 300)
    share[:, 1] = 1 - share[:, 0]
    ratio = 1 / (share[:, 0] + 1.4 * share[:, 1])
    rows = [{**ROW, "source": name} for name in names]
    parts = {part.name: part for part in residuals.parts(rows, ratio, share)}
    first, second = list(residuals.PARTS)[:2]
    assert parts[first].factor == pytest.approx(1.0, abs=0.08)
    assert parts[second].factor == pytest.approx(1.4, abs=0.12)
    assert parts[second].is_off and not parts[first].is_off
    assert residuals.parts_table(list(parts.values())).count("off") == 1


def test_a_section_moves_as_one() -> None:
    values = scaled_values(("step_ms", "optimizer.efficiency"), 2.0)
    assert values["step_ms.eager"] == pytest.approx(2e3 * constants.shipped_constants().step_s["eager"])
    assert values["optimizer.efficiency"] == pytest.approx(2 * constants.shipped_constants().optimizer_efficiency)
    assert set(values) == {f"step_ms.{name}" for name in constants.shipped_constants().step_s} | {
        "optimizer.efficiency"
    }
