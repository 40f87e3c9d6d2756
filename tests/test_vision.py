"""Vision models: graphs that replace presets in a runs table, and the cost of the layout of images."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilecast import kernels, zoo
from tilecast.cli import main
from tilecast.graph import KIND_NAMES, KernelTable, Op, Shards
from tilecast.hardware import find_gpu
from tilecast.spec import SpecError, Workload
from tilecast.zoo import huggingface, layers, traced
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.traced import document
from tilecast_lab.validate import runs
from tilecast_lab.validate.graphs import GraphName, Graphs, graph_of
from tilecast_lab.validate.table import read_published_row

RESNET = Path(__file__).parent / "graphs" / "resnet.json"
ONE = np.ones(1, dtype=np.int64)
MODEL = traced.build_model("resnet", document.read(json.loads(RESNET.read_text()), "resnet"))
IMAGE = MODEL.trace.shapes[MODEL.trace.inputs[0]][-1]  # type: ignore[union-attr]
ROW = {
    "id": "r1", "gpu": "A100-SXM4-40GB", "n_gpus": "1", "precision": "amp_fp16", "model_name": "timm/some_net",
    "global_batch": "64", "micro_batch_per_gpu": "64", "dp": "1", "tp": "1", "pp": "1", "optimizer": "sgd",
    "framework": "PyTorch 1.12", "notes": f"image size {IMAGE}, layout nchw", "trust": "A",
    "step_time_s_derived": "0.1",
}  # fmt: skip


def folder(tmp_path: Path, name: str = f"some_net@{IMAGE}.json") -> Graphs:
    (tmp_path / name).write_text(RESNET.read_text())
    return Graphs(tmp_path)


def ops(**how: Any) -> list[Op]:
    model = how.pop("model", zoo.find_preset("resnet-50"))
    built = zoo.build(Workload(model, 1, 8, **{"precision": "fp16", **how}), Shards(8 * ONE, ONE, ONE, ONE, 0 * ONE))
    return [op for block in built.blocks for op in block.ops]


def copies(**how: Any) -> int:
    return sum(".layout" in op.name for op in ops(**how))


def test_a_row_names_its_graph_by_model_and_image_size() -> None:
    assert graph_of(ROW) == GraphName("some_net", IMAGE)
    assert graph_of({**ROW, "notes": ""}) == GraphName("some_net", 0)
    assert GraphName("some_net", 224).file == "some_net@224.json" and GraphName("some_net", 0).file == "some_net.json"


@pytest.mark.parametrize("name", ["", "..\\x", "a/b c", "timm/", "a\0b"])
def test_a_name_that_is_no_files_asks_for_no_graph(name: str) -> None:
    assert graph_of({**ROW, "model_name": name}) is None


def test_a_row_is_priced_from_its_graph(tmp_path: Path) -> None:
    graphs = folder(tmp_path)
    assert runs.forecast([ROW])[0].reason == "unknown-model"
    contiguous, last = runs.forecast([ROW, {**ROW, "notes": f"image size {IMAGE}, layout nhwc"}], graphs=graphs)
    assert contiguous.seconds is not None and last.seconds is not None
    assert contiguous.parts is not None and last.parts is not None
    assert last.parts["compute"] < contiguous.parts["compute"]


@pytest.mark.parametrize(
    ("change", "field"),
    [({"params_b": "3.2"}, "row r1: params_b"), ({"notes": "image size 999"}, "row r1: notes")],
)
def test_the_graph_of_another_model_is_named_with_row_and_column(
    tmp_path: Path, change: dict[str, str], field: str
) -> None:
    folder(tmp_path, "some_net@999.json")
    with pytest.raises(SpecError) as error:
        runs.forecast([{**ROW, **change}], graphs=folder(tmp_path))
    assert error.value.field == field and "some_net@" in error.value.problem


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "tilecast-graph/1"}', '{"format": "other"}'])
def test_a_damaged_graph_is_one_line_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / f"some_net@{IMAGE}.json").write_text(text)
    table = tmp_path / "runs.csv"
    table.write_text(",".join(ROW) + "\n" + ",".join(f'"{value}"' for value in ROW.values()) + "\n")
    assert main(["validate", "runs", str(table), "--graphs", str(tmp_path)]) == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message and f"some_net@{IMAGE}.json" in message


def test_a_folder_of_graphs_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["validate", "runs", str(tmp_path / "x.csv"), "--graphs", str(tmp_path / "none")]) == 2
    assert "--graphs" in capsys.readouterr().err


def test_tensor_cores_need_copies_around_images_that_are_channels_first() -> None:
    assert copies(memory_format="contiguous") > 100
    # Only channels that fill no word would be padded; images of three channels have kernels of their own.
    assert copies(memory_format="channelsLast") == 0
    assert copies(memory_format="contiguous", precision="fp32") == 0
    assert copies(memory_format="contiguous", execution="compiled") == 0


def convolution(**dims: float) -> dict[str, Any]:
    plain = dict.fromkeys(("in_d", "in_h", "in_w", "k_d", "k_h", "k_w", "out_d", "out_h", "out_w", "groups"), 1.0)
    return {"batch": np.full(1, 8.0), **plain, **dims}


def emitted(memory_format: Any, **dims: float) -> list[Op]:
    workload = Workload(zoo.find_preset("resnet-50"), 1, 8, precision="fp16", memory_format=memory_format)
    return layers.convolution("conv", Numerics.from_workload(workload), convolution(**dims))


@pytest.mark.parametrize(
    ("framework", "memory_format"),
    [("MXNet 20.12 NGC (DALI)", "channelsLast"), ("MXNet 1.6 gluon-cv (Horovod)", "contiguous")],
)
def test_networks_of_gluoncv_read_channels_first(framework: str, memory_format: str) -> None:
    row = {
        "framework": framework, "model_name": "ResNet-50", "gpu": "V100-SXM2-16GB", "precision": "amp_fp16",
        "n_gpus": "1", "gpus_per_node": "8", "micro_batch_per_gpu": "64", "global_batch": "64", "family": "cnn",
    }  # fmt: skip
    assert read_published_row(row).workload.memory_format == memory_format


def test_tensorflow_composes_the_dropout_of_dense_layers() -> None:
    def launches(framework: str) -> float:
        built = ops(model=zoo.find_preset("wide-deep-outbrain"), framework=framework, precision="fp32")
        return float(np.mean([op.count for op in built if op.name.startswith("dropout")]))

    assert launches("ddp") == 1.0
    assert launches("tensorflow") > 3.0


WIDE = {"model": "vnet", "framework": "tensorflow", "precision": "fp16"}


@pytest.mark.parametrize(
    ("how", "is_wide"),
    [({}, True), ({"framework": "ddp"}, False), ({"execution": "xla"}, False), ({"model": "unet-2d"}, False)],
)
def test_tensorflow_runs_what_follows_a_composed_norm_in_fp32(how: dict[str, str], *, is_wide: bool) -> None:
    """auto_mixed_precision.cc propagates the mean's FP32 up to the next convolution; fused norms have no mean."""
    stated = WIDE | how
    built = ops(**stated | {"model": zoo.find_preset(stated["model"])})
    names = [op.name for op in built]
    assert ("cast" in names) == is_wide
    assert {op.table.element_bytes[0] for op in built if op.name == "relu"} <= {4 if is_wide else 2}
    assert {op.table.element_bytes[0] for op in built if KIND_NAMES[op.table.kind[0]] == "conv"} == {2}


def test_depthwise_convolutions_run_without_copies() -> None:
    names = emitted("contiguous", c_in=64.0, c_out=64.0, groups=64.0)
    assert not any("layout" in op.name for op in names)


def test_channels_that_fill_no_word_are_padded_by_copies_in_any_layout() -> None:
    assert any("layout" in op.name for op in emitted("channelsLast", c_in=27.0, c_out=64.0))


@pytest.mark.parametrize(("groups", "kind"), [(32.0, "conv"), (64.0, "conv"), (8.0, "direct_conv")])
def test_channels_last_groups_have_tensor_kernels_in_multiples_of_32(groups: float, kind: str) -> None:
    names = emitted("channelsLast", c_in=512.0, c_out=512.0, groups=groups)
    assert {KIND_NAMES[op.table.kind[0]] for op in names} == {kind}
    assert {KIND_NAMES[op.table.kind[0]] for op in emitted("contiguous", c_in=512.0, c_out=512.0, groups=groups)} == {
        "conv", "elementwise",
    }  # fmt: skip


def test_a_limit_on_accumulation_slows_no_more_than_the_tensor_cores() -> None:
    gpu = find_gpu("rtx-3090")
    table = KernelTable.from_dimensions("gemm", "fp16", batch=1.0, m=8192.0, n=8192.0, k=[512.0, 8192.0])
    limited, slow, free = (
        kernels.predict_kernel_times(table, one).seconds
        for one in (gpu, replace(gpu, fp16_accumulate_flops=0.0), gpu.without_fp32_limit())
    )
    assert (table.flops() / limited <= 1.00001 * gpu.peak("fp16")).all()
    assert (free <= limited * 1.00001).all() and (limited <= slow * 1.00001).all()


def test_eager_mixed_precision_casts_what_products_read() -> None:
    names = [op.name for op in ops(model=MODEL)]
    assert "convolution.cast" in names
    assert not any(".cast" in op.name for op in ops(model=MODEL, precision="fp32"))
    assert not any(".cast" in op.name for op in ops(model=MODEL, execution="compiled"))


@pytest.mark.slow
def test_the_memory_format_of_a_bare_model_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for memory_format in ("contiguous", "channelsLast"):
        words = [
            "advise",
            "resnet-50",
            "--batch",
            "256",
            "--gpus",
            "a100-40:8",
            "--precision",
            "fp16",
            "--plan",
            "dp=8",
        ]
        assert main([*words, "--memory-format", memory_format, "-o", "json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["recommendation"]["stepSeconds"]["target"])
    assert seconds[1] < seconds[0]


def test_the_gradient_of_regions_is_added_neighbour_by_neighbour() -> None:
    def written(name: str, memory_format: str) -> float:
        """Return the bytes that the gradient writes for each pixel of a region."""
        walked_ops = ops(model=zoo.find_preset(name), precision="fp32", memory_format=memory_format)
        gradient = next(op for op in walked_ops if op.name == "align.gradient")
        ((_, _, dims),) = gradient.table.groups()
        return float(dims["written_bytes"][0])

    # A pixel of 7 x 7 is the mean of 2 x 2 samples, one of 14 x 14 a sample; each has four neighbours of 32 bytes.
    assert written("faster-rcnn-r50-dc5", "contiguous") == 4 * 4 * 32
    assert written("faster-rcnn-r50-c4", "contiguous") == 4 * 32
    assert written("faster-rcnn-r50-dc5", "channelsLast") == 4 * 4 * 4
    assert written("faster-rcnn-r50-c4", "channelsLast") == 4 * 4


@pytest.mark.parametrize(
    ("image", "windows"), [(384, [(16, 24), (4, 24), (1, 24), (1, 12)]), (224, [(9, 24), (4, 24), (1, 14), (1, 7)])]
)
def test_windows_of_swin_are_no_larger_than_the_image_and_cover_it(image: int, windows: list[tuple[int, int]]) -> None:
    """Scores of each stage's attention cost windows, times heads, times the square of a window's tokens.

    Windows are of 24 over images of 384 pixels, whose last stage is 12 wide (arXiv 2111.09883, appendix A1.2). An
    image is padded to whole windows.
    """
    published = json.loads((Path(__file__).parent / "configs.json").read_text())["swinv2-large"]["config"]
    model = huggingface.model({**published, "image_size": image})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = zoo.build(Workload(model, 1, 1, training=False), Shards(ONE, ONE, ONE, ONE, 0 * ONE))
    stages = [block for block in built.layers if block.name.endswith("-layer")]
    flops = [next(op for op in stage.ops if op.name == "attention.scores").table.flops()[0] for stage in stages]
    wide = [2.0 * count * side**4 * 192 * 2**stage for stage, (count, side) in enumerate(windows)]
    assert flops == pytest.approx(wide)
