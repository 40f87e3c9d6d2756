"""Advice written by hand, for tests of the texts that present it."""

from __future__ import annotations

from typing import Any

from tilecast import zoo
from tilecast.advice import Advice, AdviceOrigin, Offer, Rejection, Request
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.spec import Plan, Workload
from tilecast_operator.outcome import AdviceRefusal


def pool(name: str = "h100-sxm", **changes: Any) -> Pool:
    values: dict[str, Any] = {
        "name": name,
        "gpu": find_gpu("h100-sxm"),
        "gpus_per_node": 8,
        "max_nodes": 2,
        "intra": find_link("nvlink4"),
        "inter": find_link("efa-3200"),
        "node_type": "p5.48xlarge",
        "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "tolerations": ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
        "price_per_gpu_hour": 6.88,
    }
    return Pool(**{**values, **changes})


def offer(**changes: Any) -> Offer:
    values: dict[str, Any] = {
        "pool": pool(),
        "nodes": 2,
        "gpus_per_node": 8,
        "workload": request().workload,
        "plan": Plan(data=8, tensor=2, zero_stage=3, micro_batch=1, checkpointing="selective"),
        "step_s": 8.2,
        "lower_s": 7.6,
        "upper_s": 9.0,
        "breakdown": {"compute": 7.0, "communication": 0.7, "optimizer": 0.2, "launch": 0.1, "input": 0.2},
        "memory_bytes": 61 * 2.0**30,
        "memory_lower_bytes": 58 * 2.0**30,
        "memory_upper_bytes": 70 * 2.0**30,
        "memory_available_bytes": 79 * 2.0**30,
        "memory": {"weights": 61 * 2.0**30},
        "tokens_per_s": 128_000.0,
        "cost_per_1000_steps": 250.7,
        "finish_s": 82_000.0,
        "cost_to_finish": 2507.0,
        "fits_now": None,
        "reason": "fastest; compute-bound",
    }
    return Offer(**{**values, **changes})


def request() -> Request:
    return Request("a-job", Workload(model=zoo.find_preset("llama-2-7b"), sequence_length=4096, global_batch=64))


def advice(**changes: Any) -> Advice:
    values: dict[str, Any] = {
        "request": request(),
        "offers": (offer(), offer(pool=pool("slow"), step_s=9.9)),
        "rejections": (Rejection("t4", "PrecisionNotSupported", "no BF16 units", "allow fp16"),),
        "baseline": offer(pool=pool("a100-80"), step_s=45.0),
        "uncapped": offer(nodes=4),
        "pareto": (),
        "why_not": (),
        "ties": 3,
        "tie_ratio": 1.02,
        "notes": (),
        "plans_evaluated": 1000,
        "confidence": "kernels measured on H100; 0 runs seen on this cluster",
        "provenance": AdviceOrigin(
            "0", "1", "ab" * 32, "ac" * 32, "ad" * 32, {"h100-sxm": {"gpu": "gpu-operator"}}, {}
        ),
        "inputs_hash": "cd" * 8,
    }
    return Advice(**{**values, **changes})


def refused() -> AdviceRefusal:
    return AdviceRefusal("InvalidSpec", "spec.training.globalBatchSize: 0 is out of range; use 1 or more")
