"""`tilecast show`: what Tilecast knows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from tilecast import models
from tilecast.cli import EXIT_OK
from tilecast.hardware import gpus, links
from tilecast.spec import Workload


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(_SHOW))


def run(options: argparse.Namespace) -> int:
    for line in _SHOW[options.what]():
        print(line)
    return EXIT_OK


def _gpu_lines() -> list[str]:
    lines = [f"{'GPU':16s} {'GiB':>5s} {'GB/s':>6s} {'SMs':>4s}  dense TFLOP/s"]
    for gpu in gpus().values():
        memory, bandwidth = gpu.memory_bytes / 2**30, gpu.memory_bandwidth_bytes_per_s / 1e9
        rates = "  ".join(f"{name} {rate / 1e12:g}" for name, rate in gpu.peak_flops.items())
        lines.append(f"{gpu.name:16s} {memory:5.0f} {bandwidth:6.0f} {gpu.sm_count:4d}  {rates}")
    return lines


def _model_lines() -> list[str]:
    distinct = {model.name: model for model in models.presets().values()}
    return [f"{'MODEL':22s} {'FAMILY':10s} PARAMETERS"] + [
        f"{name:22s} {model.family:10s} {models.parameters(Workload(model, 128, 1)) / 1e6:10,.0f}M"
        for name, model in sorted(distinct.items())
    ]


def _link_lines() -> list[str]:
    return [f"{'LINK':22s} {'GB/s':>7s}  PER"] + [
        f"{link.name:22s} {link.bandwidth_bytes_per_s / 1e9:7.4g}  {'node' if link.per_node else 'GPU'}"
        for link in links().values()
    ]


_SHOW: Mapping[str, Callable[[], list[str]]] = {"gpus": _gpu_lines, "models": _model_lines, "links": _link_lines}
