import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import constants, environment, kernels
from tilecast.graph import KINDS, KernelTable
from tilecast.hardware import find_gpu, list_gpus
from tilecast.kernels import features, tiles, utilization
from tilecast.spec import PRECISIONS, SpecError

SHIPPED = Path(utilization.__file__).parent / "weights" / "utilization.onnx"
ROUNDING = 1 + 1e-5
"""Tolerance for the single precision in which the networks compute."""

size = st.one_of(st.integers(1, 1 << 14), st.sampled_from([1 << power for power in range(15)]))
small = st.integers(1, 64)
flag = st.integers(0, 1)
CONV = {
    "batch": small, "c_in": size, "c_out": size, "in_d": st.just(1), "in_h": small, "in_w": small, "k_d": st.just(1),
    "k_h": st.integers(1, 7), "k_w": st.integers(1, 7), "out_d": st.just(1), "out_h": small, "out_w": small,
    "groups": st.just(1), "direction": st.integers(0, 2),
}  # fmt: skip
DIMS = {
    "gemm": {"batch": small, "m": size, "n": size, "k": size, "accumulated": flag},
    "attention": {
        "batch": small, "heads": small, "kv_heads": small, "seq_q": size, "seq_kv": size,
        "head_dim": st.sampled_from([32, 64, 80, 128, 256]), "causal": flag, "backward": flag,
    },
    "conv": CONV,
    "direct_conv": CONV,
    "elementwise": {
        "elements": st.integers(1, 1 << 32), "read_bytes": small, "written_bytes": small, "drawn": flag,
    },
} | {
    kind: {"rows": size, "cols": size, "backward": flag}
    for kind in ("softmax", "layernorm", "rmsnorm", "cross_entropy", "embedding")
}  # fmt: skip
NOT_DOUBLED = ("accumulated", "causal", "backward", "direction", "drawn", "groups")


@st.composite
def kernel(draw):
    """Draw a kernel of any kind, with a precision and a GPU that supports it."""
    gpu = draw(st.sampled_from(list(list_gpus().values())))
    precision = draw(st.sampled_from([name for name in PRECISIONS if gpu.supports(name)]))
    kind = draw(st.sampled_from(list(KINDS)))
    return kind, precision, {name: draw(strategy) for name, strategy in DIMS[kind].items()}, gpu


def test_every_kind_is_drawn():
    assert set(DIMS) == set(KINDS)


def test_reads_from_the_cache_are_faster_than_writes():
    def seconds(elements, **moved):
        table = KernelTable.from_dimensions("elementwise", "fp16", elements=elements, drawn=0.0, **moved)
        return kernels.predict_kernel_times(table, find_gpu("A100-SXM4-80GB")).seconds[0]

    reading, writing = {"read_bytes": 5.0, "written_bytes": 1.0}, {"read_bytes": 1.0, "written_bytes": 5.0}
    assert seconds(4e6, **reading) < 0.9 * seconds(4e6, **writing)
    assert seconds(4e8, **reading) == seconds(4e8, **writing)


@settings(max_examples=300)
@given(kernel())
@pytest.mark.slow
def test_no_kernel_beats_the_machine(drawn):
    kind, precision, dims, gpu = drawn
    table = KernelTable.from_dimensions(kind, precision, **dims)
    times = kernels.predict_kernel_times(table, gpu)
    moved = table.bytes()
    bandwidth = gpu.memory_bandwidth_bytes_per_s if moved > 2 * gpu.l2_bytes else gpu.l2_bandwidth_bytes_per_s
    assert np.isfinite(times.seconds).all()
    assert np.isfinite(times.spread).all() and (times.spread > 0).all()
    assert (moved / times.seconds <= bandwidth * ROUNDING).all()
    if kind in features.PRODUCTS:
        saved = 2.25 if kind == "conv" else 1.0
        assert (table.flops() / saved / times.seconds <= gpu.peak(precision) * ROUNDING).all()
    assert ((times.utilization > 0) & (times.utilization <= ROUNDING)).all()


@settings(max_examples=300)
@given(kernel())
@pytest.mark.slow
def test_doubling_a_dimension_never_lowers_the_time(drawn):
    kind, precision, dims, gpu = drawn
    grown = [name for name in dims if name not in NOT_DOUBLED]
    columns = {name: [value] + [value * (1 + (name == other)) for other in grown] for name, value in dims.items()}
    base, *doubled = kernels.predict_kernel_times(KernelTable.from_dimensions(kind, precision, **columns), gpu).seconds
    assert (np.array(doubled) * ROUNDING >= base).all(), dict(zip(grown, doubled, strict=True))


@given(st.lists(st.floats(0.01, 1 << 20), min_size=3, max_size=3), st.integers(0, 3), st.sampled_from(["m", "n", "k"]))
def test_regular_shapes_stay_so_when_doubled(sides, times, which):
    d = {name: np.array([float(side)]) for name, side in zip(("m", "n", "k"), sides, strict=True)}
    larger = {**d, which: d[which] * 2**times}
    assert features.has_irregular_sides(d) == features.has_irregular_sides(larger)
    assert features.find_odd_factor(d[which]) == features.find_odd_factor(larger[which])


@pytest.mark.parametrize("grown", ["c_in", "c_out", "batch", "out_h"])
@pytest.mark.parametrize("direction", [0, 1, 2])
@pytest.mark.parametrize("gpu", ["a100-40-pcie", "h100-sxm", "l4"])
def test_doubling_the_channels_of_a_grouped_convolution_never_lowers_the_time(gpu, direction, grown):
    rng = np.random.default_rng(0)
    groups = 2.0 ** rng.integers(0, 6, 200)
    d = dict.fromkeys(KINDS["conv"].dims, np.ones(200)) | {
        "groups": groups,
        "direction": np.full(200, float(direction)),
    }
    d |= {"batch": rng.integers(1, 65, 200), "c_in": groups * rng.integers(1, 300, 200)}
    d |= {"c_out": groups * rng.integers(1, 300, 200), "in_h": np.full(200, 14.0), "in_w": np.full(200, 14.0)}
    d |= {"out_h": np.full(200, 14.0), "out_w": np.full(200, 14.0), "k_h": np.full(200, 3.0), "k_w": np.full(200, 3.0)}
    once, twice = (
        kernels.predict_kernel_times(
            KernelTable.from_dimensions("conv", "fp16", **{**d, grown: d[grown] * times}), find_gpu(gpu)
        ).seconds
        for times in (1, 2)
    )
    assert (twice * ROUNDING >= once).all()


def test_a_convolution_priced_as_a_product_is_not_refined():
    gpu = find_gpu("a100-80")
    d = {
        name: np.array([float(value)])
        for name, value in zip(KINDS["conv"].dims, (8, 64, 64, 1, 1, 56, 56, 1, 3, 3, 1, 56, 56, 0), strict=True)
    }
    asked = features.compute_network_inputs(
        "gemm_tensor", features.pack_groups_into_gemm(features.compute_work(KINDS["conv"], "fp16", d)), gpu, "fp16"
    )
    assert (asked.columns == asked.columns[0]).all()


def test_time_is_the_same_alone_and_in_a_batch():
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 8192, (3, 200))
    table = KernelTable.from_dimensions("gemm", "bf16", batch=1, m=sizes[0], n=sizes[1], k=sizes[2])
    whole = kernels.predict_kernel_times(table, find_gpu("a100-80")).seconds
    for row in (0, 7, 199):
        alone = KernelTable.from_dimensions("gemm", "bf16", batch=1, m=sizes[0][row], n=sizes[1][row], k=sizes[2][row])
        assert kernels.predict_kernel_times(alone, find_gpu("a100-80")).seconds[0] == pytest.approx(
            whole[row], rel=1e-5
        )


def test_kinds_and_precisions_mix_in_one_table():
    parts = [
        KernelTable.from_dimensions("gemm", "bf16", batch=1, m=4096, n=4096, k=4096),
        KernelTable.from_dimensions("rmsnorm", "bf16", rows=4096, cols=4096, backward=[0, 1]),
        KernelTable.from_dimensions("gemm", "fp32", batch=1, m=4096, n=4096, k=4096),
        KernelTable.from_dimensions(
            "attention", "bf16", batch=1, heads=32, kv_heads=8, seq_q=4096, seq_kv=4096, head_dim=128, causal=1,
            backward=[0, 1],
        ),
    ]  # fmt: skip
    gpu = find_gpu("h100-sxm")
    together = kernels.predict_kernel_times(KernelTable.concatenate(parts), gpu)
    apart = np.concatenate([kernels.predict_kernel_times(part, gpu).seconds for part in parts])
    assert together.seconds == pytest.approx(apart, rel=1e-5)
    assert together.seconds[3] > 5 * together.seconds[0], "FP32 does not run on the tensor cores"
    assert together.seconds[5] > together.seconds[4], "the backward pass of attention does more work"


@pytest.mark.parametrize(
    ("gpu", "precision", "low", "high"),
    [
        ("h100-sxm", "bf16", 0.60, 0.90),
        ("a100-80", "bf16", 0.70, 0.95),
        ("t4", "fp16", 0.40, 0.75),
        ("l4", "fp32", 0.2, 0.45),
    ],
)
def test_a_large_product_reaches_a_known_share_of_the_peak(gpu, precision, low, high):
    table = KernelTable.from_dimensions("gemm", precision, batch=1, m=8192, n=8192, k=8192)
    times = kernels.predict_kernel_times(table, find_gpu(gpu))
    assert low < table.flops()[0] / times.seconds[0] / find_gpu(gpu).peak(precision) < high


def test_a_gradient_added_in_fp32_takes_longer_by_its_traffic():
    sizes = {"batch": 8, "m": 4096, "n": 4096, "k": 512}
    plain, added = (
        KernelTable.from_dimensions("gemm", "bf16", **sizes),
        KernelTable.from_dimensions("gemm", "bf16", **sizes, accumulated=1),
    )
    assert added.bytes()[0] - plain.bytes()[0] == 8 * 4096 * 4096 * (8 - 2)
    gpu = find_gpu("a100-80")
    alone, both = (kernels.predict_kernel_times(table, gpu).seconds[0] for table in (plain, added))
    assert alone < both < alone + 8 * 4096 * 4096 * 8 / gpu.memory_bandwidth_bytes_per_s


def test_drawing_random_numbers_takes_time():
    sizes = {"elements": 1 << 28, "read_bytes": 2, "written_bytes": 3}
    plain, drawn = (KernelTable.from_dimensions("elementwise", "fp16", **sizes, drawn=flag) for flag in (0, 1))
    gpu = find_gpu("v100-sxm")
    extra = kernels.predict_kernel_times(drawn, gpu).seconds - kernels.predict_kernel_times(plain, gpu).seconds
    cycles = (1 << 28) * constants.shipped_constants().kernels.random_number_cycles
    assert extra == pytest.approx([cycles / (gpu.sm_count * gpu.boost_clock_hz)])


def test_many_small_products_take_longer_than_one_and_less_than_each_alone():
    gpu = find_gpu("v100-sxm")
    batches = np.array([1.0, 8.0, 64.0])
    times = kernels.predict_kernel_times(
        KernelTable.from_dimensions("gemm", "fp16", batch=batches, m=2048, n=64, k=2048), gpu
    ).seconds
    assert (np.diff(times) > 0).all()
    assert (times <= times[0] * batches * ROUNDING).all()


def test_winograd_counts_its_reduced_flops():
    dims = dict.fromkeys(KINDS["conv"].dims, 1.0) | {"batch": 32, "c_in": 256, "c_out": 256, "direction": 0}
    dims |= {"k_h": 3, "k_w": 3, "in_h": 56, "in_w": 56, "out_h": 56, "out_w": 56}
    d = {name: np.array([value], float) for name, value in dims.items()}
    plain, moved = KINDS["conv"].flops(d), KINDS["conv"].bytes(d, np.array([4.0]))
    work = features.compute_work(KINDS["conv"], "fp32", d)
    assert work.flops == plain / constants.shipped_constants().kernels.winograd_reduction
    assert work.moved_bytes == moved
    assert features.compute_work(KINDS["conv"], "fp16", d).flops == plain


@pytest.mark.parametrize(
    ("gpu", "precision"), [("t4", "bf16"), ("a100-80", "fp8"), ("p4", "fp16"), ("v100-sxm", "tf32")]
)
def test_a_precision_the_gpu_lacks_is_refused(gpu, precision):
    with pytest.raises(SpecError, match=f"{gpu} has no {precision} units"):
        kernels.predict_kernel_times(
            KernelTable.from_dimensions("gemm", precision, batch=1, m=8, n=8, k=8), find_gpu(gpu)
        )


@pytest.mark.parametrize("value", [0, -4, np.nan, np.inf, 1e30])
def test_a_size_that_is_none_is_refused(value):
    with pytest.raises(SpecError, match=r"gemm\.m: .* is no size of a kernel"):
        kernels.predict_kernel_times(
            KernelTable.from_dimensions("gemm", "fp32", batch=1, m=value, n=8, k=8), find_gpu("t4")
        )


def test_an_empty_table_has_no_times():
    times = kernels.predict_kernel_times(
        KernelTable.from_dimensions("gemm", "fp32", batch=[], m=[], n=[], k=[]), find_gpu("t4")
    )
    assert len(times.seconds) == len(times.spread) == len(times.roofline_s) == 0


def test_the_model_is_small_and_known_by_its_digest():
    version, digest = kernels.describe_model_file()
    assert version.count(".") == 2
    assert len(digest) == 64
    assert sum(path.stat().st_size for path in SHIPPED.parent.glob("*.onnx")) <= 2e6


def damaged(change: str, path: Path) -> None:
    model = onnx.load(SHIPPED)
    properties = {item.key: item for item in model.metadata_props}
    if change == "format":
        properties["format"].value = "something else"
    elif change == "description":
        properties["description"].value = "{"
    elif change == "columns":
        text = json.loads(properties["description"].value)
        text["networks"]["attention"]["columns"].pop()
        properties["description"].value = json.dumps(text)
    data = model.SerializeToString()
    path.write_bytes(data[: len(data) // 2] if change == "half" else data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("format", "states 'something else'"), ("description", "damaged description"),
        ("columns", "attention network does not fit"), ("half", "not a usable ONNX file"),
    ],
)  # fmt: skip
def test_a_foreign_or_damaged_model_is_refused(change, says, tmp_path):
    damaged(change, tmp_path / "model.onnx")
    with pytest.raises(SpecError, match=says) as caught:
        kernels.describe_model_file(tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        kernels.describe_model_file(tmp_path / "none.onnx")


def test_tiles_cover_the_output_and_waves_the_tiles():
    gpu = find_gpu("a100-80")
    m, n, k, batch = np.array(
        [[1, 129, 4096, 8192], [64, 1000, 4096, 8192], [8192, 64, 4096, 512], [1, 3, 1, 2]], float
    )
    tiling = tiles.choose_tiling(m, n, k, batch, gpu, "tensor")
    covered = tiling.tiles / tiling.split_k * tiling.rows * tiling.cols
    assert (covered >= m * n * batch).all()
    assert (tiling.waves == np.ceil(tiling.tiles / gpu.sm_count)).all()
    assert ((tiling.fill > 0) & (tiling.fill <= 1)).all()


def test_a_large_product_takes_a_large_tile_and_a_narrow_one_splits_k():
    gpu = find_gpu("a100-80")
    columns = np.array([[8192, 64], [8192, 64], [8192, 65536], [1, 1]], float)
    tiling = tiles.choose_tiling(*columns, gpu, "tensor")
    assert tiling.rows[0] * tiling.cols[0] == 256 * 128
    assert tiling.split_k.tolist() == [1, 16]


def test_kernels_without_tiles_report_one():
    times = kernels.predict_kernel_times(
        KernelTable.from_dimensions("softmax", "fp32", rows=4096, cols=[512, 1024], backward=0), find_gpu("t4")
    )
    assert times.tiling().tiles.tolist() == [1, 1]


def test_a_gpu_never_seen_is_less_certain_than_its_twin():
    table = KernelTable.from_dimensions("gemm", "bf16", batch=1, m=4096, n=4096, k=4096)
    known, unknown = (kernels.predict_kernel_times(table, find_gpu(name)).spread[0] for name in ("a100-80", "a40"))
    assert known < unknown


@pytest.mark.slow
def test_the_runtime_is_told_not_to_report_to_its_maker() -> None:
    call = "from tilecast import kernels; kernels.describe_model_file()"
    code = f"import os; {call}; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_a_model_with_another_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(SHIPPED.read_bytes())
    digest = utilization.load_model().sha256
    try:
        environment.apply_environment(
            {"TILECAST_UTILIZATION_MODEL": str(path), "TILECAST_UTILIZATION_MODEL_SHA256": digest.upper()}
        )
        assert kernels.describe_model_file()[1] == digest
        utilization.set_default_model(str(path), "0" * 64)
        with pytest.raises(SpecError, match="not 000000000000… as TILECAST_UTILIZATION_MODEL_SHA256 states"):
            utilization.load_model()
        utilization.set_default_model(str(tmp_path / "none"))
        with pytest.raises(SpecError, match="cannot be read"):
            utilization.load_model()
    finally:
        environment.apply_environment({})
    assert utilization.load_model().sha256 == digest


def test_distinct_kernels_are_every_kernel_once() -> None:
    rng = np.random.default_rng(0)
    # Enough rows for more than one part, with equal neighbours and equal rows far apart.
    m, n = (np.repeat(rng.integers(1, 12, 3000), 3) for _ in range(2))
    accumulated = np.where(m > 6, 0.0, -0.0)
    products = [
        KernelTable.from_dimensions("gemm", one, batch=1, m=m, n=n, k=64, accumulated=accumulated)
        for one in ("bf16", "fp32")
    ]
    table = KernelTable.concatenate(products)
    few, index = table.distinct()
    assert (few.dims[index] == table.dims).all() and (few.precision[index] == table.precision).all()
    seen = {(int(precision), *row) for precision, row in zip(table.precision, table.dims.tolist(), strict=True)}
    assert len(few) == len(seen) < len(table) / 50
