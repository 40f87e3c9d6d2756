"""Kernels on few numbers between which the host reads results: matches of boxes in detectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilecast import constants, kernels, zoo
from tilecast.graph import Op
from tilecast.hardware import find_gpu
from tilecast.spec import Plan, Plans, Workload
from tilecast.step import blocks
from tilecast.step.weights import gradient_wait_seconds

A100 = find_gpu("a100-40")
DETECTORS = ["detr-r50", "retinanet-r50", "faster-rcnn-r50-fpn", "mask-rcnn-r50-c4"]


def host_paced(name: str, images: int = 4, **how: Any) -> list[tuple[Op, float]]:
    """Return the host-paced operators of a detector, and the seconds of each."""
    workload = Workload(zoo.find_preset(name), 1, images, **{"precision": "fp32", "framework": "ddp", **how})
    graph = zoo.build_sharded_graph(workload, Plans.from_plans(Plan(micro_batch=images))).graph
    table, rows = graph.kernels()
    times = kernels.predict_kernel_times(table, A100)
    ops = [op for block in graph.blocks for op in block.ops]
    pairs = zip(ops, rows, strict=True)
    return [(op, float(blocks.operator_seconds(workload, op, times, row)[0])) for op, row in pairs if op.host_paced]


@pytest.mark.parametrize("name", DETECTORS)
def test_matching_takes_no_less_than_its_launches(name: str) -> None:
    forward_s, backward_s = constants.shipped_constants().launch_s["eager"]
    found = host_paced(name)
    assert found
    for op, seconds in found:
        launch_s = forward_s if op.phase == "forward" else backward_s
        assert seconds == pytest.approx(op.count * float(np.max(op.launches)) * launch_s)


@pytest.mark.parametrize("name", DETECTORS)
def test_images_are_matched_one_by_one_in_training_alone(name: str) -> None:
    few, many = (sum(seconds for _, seconds in host_paced(name, images)) for images in (2, 16))
    assert 1.3 * few < many <= 8 * few
    assert not host_paced(name, training=False)


def test_other_kernels_do_not_hide_the_launches_of_host_paced_ones() -> None:
    """The host's seconds of a pass are those that computation may hide; host-paced launches are in the GPU's."""
    workload = Workload(zoo.find_preset("detr-r50"), 1, 4, precision="fp32", framework="ddp")
    sharded = zoo.build_sharded_graph(workload, Plans.from_plans(Plan(micro_batch=4)))
    (times,) = blocks.kernel_seconds(workload, sharded, A100).blocks
    paced_s = sum(seconds for op, seconds in host_paced("detr-r50") if op.phase == "forward")
    plain = sum(
        op.count * float(np.max(op.launches)) for op in times.block.ops if op.phase == "forward" and not op.host_paced
    )
    forward_s, _ = constants.shipped_constants().launch_s["eager"]
    assert times.forward.host_s[0] == pytest.approx(plain * forward_s)
    assert times.forward.gpu_s[0] > 2 * paced_s > 0.02


def test_only_torchvision_computes_the_loss_of_one_stage_detectors_image_by_image() -> None:
    def launches(framework: str) -> float:
        return sum(op.count * float(np.max(op.launches)) for op, _ in host_paced("retinanet-r50", framework=framework))

    assert launches("ddp") > 2 * launches("detectron2") == 2 * launches("tensorflow") > 0


def test_a_captured_step_hardly_waits_for_matching() -> None:
    eager, captured = (
        sum(seconds for _, seconds in host_paced("mask-rcnn-r50-c4", execution=execution))
        for execution in ("eager", "cudaGraphs")
    )
    assert captured < eager / 20


@pytest.mark.parametrize(("model", "waits"), [("stable-diffusion-v2", False), ("flux.1", False), ("resnet-50", True)])
def test_replicas_with_latents_do_not_wait_for_each_others_samples(model: str, *, waits: bool) -> None:
    """Latents have one size and are encoded in advance, so that no host decodes longer than another."""
    workload = Workload(zoo.find_preset(model), 1, 16, precision="bf16", framework="ddp")
    plans = Plans.from_plans(Plan(data=8, micro_batch=2))
    graph = zoo.build_sharded_graph(workload, plans).graph
    waited_s = gradient_wait_seconds(workload, graph, plans, constants.shipped_constants())
    assert (waited_s[0] > 0) == waits
