"""Environment variables that change forecasts, read once where a program starts: the command line, the operator."""

from __future__ import annotations

from collections.abc import Mapping

from tilecast import hardware
from tilecast.kernels import utilization


def apply(environment: Mapping[str, str]) -> None:
    """Take links and the utilization model from where the variables point to; without them, those that ship."""
    hardware.use_links(environment.get(hardware.LINKS, ""))
    model, sha256 = environment.get(utilization.MODEL, ""), environment.get(utilization.MODEL_SHA256, "")
    utilization.use_model(model, sha256.strip().lower())
