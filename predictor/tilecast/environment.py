"""Environment variables that change forecasts, read once where a program starts."""

from __future__ import annotations

from collections.abc import Mapping

from tilecast import hardware
from tilecast.kernels import utilization


def apply_environment(environment: Mapping[str, str]) -> None:
    """Use the links and the utilization model that environment variables name, or else the shipped ones."""
    hardware.set_link_folder(environment.get(hardware.LINKS, ""))
    model, sha256 = environment.get(utilization.MODEL, ""), environment.get(utilization.MODEL_SHA256, "")
    utilization.set_default_model(model, sha256.strip().lower())
