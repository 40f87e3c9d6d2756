"""Training: a small network for kernels of a known law, and the file that it is written to."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from tilecast import kernels
from tilecast.constants import Constants
from tilecast.graph import KINDS, KernelTable
from tilecast.hardware import Gpu, find_gpu
from tilecast.kernels import features, utilization
from tilecast.spec import Floats, SpecError
from tilecast_lab.fit import ceilings, export, network, samples, training
from tilecast_lab.fit import step as step_fit
from tilecast_lab.validate.constants import with_values

GPU = find_gpu("a100-80")
CONSTANTS = files("tilecast").joinpath("constants.toml")
STEPS = 100
ROWS = 600


def shapes(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn = {
        name: np.rint(2 ** rng.uniform(0, top, ROWS)) for name, top in (("batch", 3), ("m", 13), ("n", 13), ("k", 13))
    }
    return drawn | {"accumulated": np.zeros(ROWS)}


def measured(d: dict[str, np.ndarray], gpu: Gpu) -> samples.Samples:
    """Return kernels at six tenths of the roofline, twice as slow with an odd `n`, plus three microseconds of ramp."""
    table = KernelTable.from_dimensions("gemm", "fp16", **d)
    work = features.compute_work(KINDS["gemm"], "fp16", d)
    asked = features.compute_network_inputs("gemm_tensor", work, gpu, "fp16")
    roofline = np.maximum(work.flops / gpu.peak("fp16"), kernels.formulas.memory_floor_s(work.moved_bytes, gpu))
    count, zero = len(table), np.zeros(len(table))

    def same(text: str) -> np.ndarray:
        return np.full(count, text, object)

    return samples.Samples(
        columns=asked.columns[0], larger=np.moveaxis(asked.columns[1:], 0, 1).astype(np.float32),
        details=asked.details, names=asked.names,
        case=kernels.list_case_names(KINDS["gemm"], "fp16", d, gpu).astype(object),
        die=same(utilization.name_die(gpu)), gpu=same(gpu.name),
        clock_hz=np.full(count, gpu.boost_clock_hz), roofline_s=roofline, moved=work.moved_bytes, rows=zero,
        written_share=np.ones(count),
        measured_s=3e-6 + roofline / 0.6 * np.where(d["n"] % 2, 1.3, 1.0), added_s=zero, least_s=zero,
        weight=np.ones(count), general=np.ones(count, bool), fold=np.zeros(count, np.int64),
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[network.Trained, samples.Samples, Path]:
    """Return a briefly trained network, its training samples, and the file that it was written to."""
    learned = measured(shapes(0), GPU)
    net = network.train(learned, steps=STEPS, steepest=1.2, seed=0, report=lambda _: None)
    networks = {"gemm_tensor": net}
    path = tmp_path_factory.mktemp("fit") / "model.onnx"
    export.write(path, networks, training.describe_fit(networks, {"gemm_tensor": learned}, dict(ceilings.DEFAULTS)))
    return net, learned, path


@pytest.mark.long
def test_training_learns_the_law(written):
    net, learned, _ = written
    off = np.abs(training.shown_durations(learned, net) / learned.measured_s - 1)
    untrained = np.abs(learned.roofline_s / learned.measured_s - 1)
    assert off.mean() < 0.15 < untrained.mean()


@pytest.mark.long
def test_the_file_answers_like_the_weights(written):
    net, _, path = written
    d = shapes(1)
    expected = training.shown_durations(measured(d, GPU), net)
    seconds = kernels.predict_kernel_times(KernelTable.from_dimensions("gemm", "fp16", **d), GPU, model=path)
    assert seconds.seconds == pytest.approx(expected, rel=2e-4)


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["a100-80", "b200", "t4"])
@pytest.mark.parametrize("dim", ["batch", "m", "n", "k"])
def test_a_network_that_hardly_learned_keeps_the_law_too(written, gpu, dim):
    _, _, path = written
    d = shapes(2)
    once, twice = (
        kernels.predict_kernel_times(
            KernelTable.from_dimensions("gemm", "fp16", **{**d, dim: d[dim] * times}), find_gpu(gpu), model=path
        ).seconds
        for times in (1, 2)
    )
    assert (twice * (1 + 1e-6) >= once).all()


@pytest.mark.long
def test_the_details_are_heard(written):
    net, learned, _ = written
    plain = network.predict(net, learned, np.zeros(len(learned), np.int64))
    deaf = samples.replace(learned, larger=np.repeat(learned.columns[:, None], net.doubled, axis=1))
    without = network.predict(net, deaf, np.zeros(len(learned), np.int64))
    assert (plain >= without).all()
    assert (plain - without).max() > 0.1


@pytest.mark.long
def test_networks_that_are_kept_answer_as_shipped(written, tmp_path):
    net, learned, _ = written
    shipped = utilization.load_model().description
    others_kinds = tuple(family for family in shipped.networks if family != "gemm_tensor")
    fresh = training.describe_fit({"gemm_tensor": net}, {"gemm_tensor": learned}, dict(shipped.ceilings))
    others = {family: shipped.networks[family] for family in others_kinds}
    path = tmp_path / "mixed.onnx"
    export.write(
        path,
        {"gemm_tensor": net},
        fresh.model_copy(update={"networks": others | dict(fresh.networks)}),
        shipped_kinds=others_kinds,
    )
    table = KernelTable.concatenate(
        [
            KernelTable.from_dimensions("attention", "fp16", batch=1, heads=16, kv_heads=16, seq_q=2048, seq_kv=2048,
                                        head_dim=64,
                           causal=1, backward=[0, 1]),
            KernelTable.from_dimensions("gemm", "fp32", batch=1, m=512, n=512, k=512),
            KernelTable.from_dimensions("layernorm", "fp16", rows=4096, cols=1024, backward=[0, 1]),
            KernelTable.from_dimensions("gemm", "fp16", batch=1, m=4096, n=4096, k=4096),
        ]
    )  # fmt: skip
    mixed, plain = (kernels.predict_kernel_times(table, GPU, model=model).seconds for model in (path, None))
    assert mixed[:-1] == pytest.approx(plain[:-1], rel=1e-6)
    assert mixed[-1] != pytest.approx(plain[-1], rel=1e-3)


def test_a_family_that_is_none_cannot_be_fitted(tmp_path):
    with pytest.raises(SpecError, match=r"only: gemms is neither a family nor a ceiling; choose from gemm_tensor"):
        training.fit(tmp_path, tmp_path / "model.onnx", only=["gemms"])


class Counted:
    """A sample whose step is its matrix products, and that counts how often it is priced."""

    measured_s = np.array([1.0, 1.1, 1.2, 1.3])
    source = ("one", "one", "other", "other")
    weight = np.ones(4)
    priced = 0

    def steps(self, tables: Sequence[Constants], processes: int) -> Floats:
        self.priced += len(tables)
        return np.array([np.full(4, fitted.factor["matrix"]) for fitted in tables])


@pytest.mark.data
def test_several_processes_price_rows_as_one_does() -> None:
    rows = Path(os.environ["TILECAST_DATA"]) / "e2e" / "neusight_dev.csv"
    sample, table = step_fit.Sample.of([rows]), tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))
    tables = [Constants.from_table(table), with_values({"factor.matrix": 2.0}, table)]
    alone, together = (sample.steps(tables, processes) for processes in (1, 2))
    assert np.array_equal(alone, together)
    assert (alone[1] > alone[0]).all()


def test_a_round_prices_its_rows_once_for_each_constant(capsys: pytest.CaptureFixture[str]) -> None:
    table = tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))
    alone, fitted = Counted(), Counted()
    step_fit.LinearizedModel.at(table, alone)  # type: ignore[arg-type]
    best, model = step_fit.fit(table, fitted, rounds=1)  # type: ignore[arg-type]
    assert fitted.priced == 2 * alone.priced  # at the start and at the end of the round
    error = np.median(np.abs(best["factor"]["matrix"] / fitted.measured_s - 1))
    assert f"median error {error:.1%}" in capsys.readouterr().out
    assert model.off == pytest.approx(np.log(fitted.measured_s / best["factor"]["matrix"]))
