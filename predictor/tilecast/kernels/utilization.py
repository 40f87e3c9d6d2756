"""The trained model: one ONNX file with a network per kind of kernel and the fitted ceilings of the other kinds.

Only this module uses onnxruntime. The metadata of the file hold, as JSON:

* the columns that each network expects: names, order, scaling and the range in training;
* the cases and GPUs of the training data;
* the bandwidth ceilings of kinds without a network, and the calibrated spreads.

All of it is checked when the file is loaded, so that a foreign or damaged file is refused.

Each network maps the columns of `features` to log2 of the kernel's duration in clock cycles. Its weights on the columns
are non-negative and its activations non-decreasing, so a larger column never shortens a kernel. Properties other than
the shape (case, GPU) enter as a bias, which the context index chooses. Doubling a dimension increases the predicted
time. A refined network adds at most a share of the least such increase, so that a doubled kernel still takes no less
time. The utilization is the roofline's share of the duration.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from tilecast.hardware import Gpu
from tilecast.kernels.features import NetworkInputs
from tilecast.spec import Floats, SpecError

FORMAT = "tilecast-utilization/2"
MODEL, MODEL_SHA256 = "TILECAST_UTILIZATION_MODEL", "TILECAST_UTILIZATION_MODEL_SHA256"
"""Environment variables that name another model file than the shipped one, and its digest."""
REMEDY = "use a file written by `python -m tilecast_lab fit`, or leave the option out for the one that ships"


FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("tensor",),
    "simt": ("simt irregular",),
    "simt irregular": ("simt",),
    "fp8 forward full": ("fp8 forward causal", "forward full"),
    "fp8 forward causal": ("forward causal",),
    "fp8 backward full": ("backward full",),
    "fp8 backward causal": ("backward causal",),
}
"""Cases that replace a case which the file was not trained on, nearest first."""


class _ModelPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(_ModelPart):
    """Relative half-widths of the 90 % interval: one for GPUs in the training data and one for other GPUs."""

    seen: float
    unseen: float
    dies: Mapping[str, float] = {}
    """Half-width by die, for dies with enough measured samples."""

    def half_width_on(self, gpu: Gpu, measured: bool) -> float:
        """Return the half-width of the range on a GPU.

        `measured` says whether the GPU's die is in the training data.
        """
        return self.dies.get(name_die(gpu), self.seen) if measured else self.unseen


class TrainedNetwork(_ModelPart):
    """Description of a network in the model file.

    A context index is `dies.index(die) * len(cases) + cases.index(case)`. The first die has an empty name, which stands
    for any GPU.
    """

    columns: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    cases: tuple[str, ...]
    dies: tuple[str, ...]
    seen: Mapping[str, tuple[str, ...]]
    """Measured dies by case. In another case a die uses the bias of a case, but has the spread of unseen dies."""
    spread: Mapping[str, Spread]
    doubled: int = 0
    """Number of dimensions whose doubling the network reads; zero if details do not refine the network."""
    details: int = 0

    def build_empty_inputs(self) -> NetworkInputs:
        """Return the inputs of one kernel whose columns are all zero."""
        return NetworkInputs(
            self.columns, np.zeros((1 + self.doubled, 1, len(self.columns))), np.zeros((1, self.details))
        )


class BandwidthCeiling(_ModelPart):
    """Fitted limits of a kernel that bandwidth bounds, which `formulas` reads."""

    ramp_s: float
    """Duration on an empty GPU."""
    dram_share: float
    l2_share: float
    sm_bytes_per_clock: float
    """Bytes of a single row that one SM streams per clock."""
    row_cycles: float
    """Least clock cycles that a row costs its SM."""
    extra_passes: float
    """Traffic of the passes over a row after the first, relative to the least traffic."""
    resident_row_bytes: float
    """Largest row that needs no further pass."""
    reuse_share: float
    """Share of the L2 that rows in flight may fill before those passes miss."""
    spread: Spread
    dies: Mapping[str, float] = {}
    """Factor on `dram_share` for the dies that were seen in training."""


class ModelDescription(_ModelPart):
    """The metadata of a model file."""

    format: str
    version: str
    networks: Mapping[str, TrainedNetwork]
    ceilings: Mapping[str, BandwidthCeiling]


def name_die(gpu: Gpu) -> str:
    """Return a text with a GPU's compute capability and SM count; GPUs with equal text run kernels equally fast."""
    return f"{gpu.compute_capability:g}x{gpu.sm_count}"


@dataclass(frozen=True, slots=True)
class KernelContext:
    """Row of a die and a case in the bias tables of a network, and the spread of predictions there.

    The spread is a relative half-width; the range holds 90 % of the measurements.
    """

    index: int
    spread: float


@dataclass(frozen=True, slots=True)
class UtilizationModel:
    """A loaded model file."""

    description: ModelDescription
    sha256: str
    session: Any
    """An `onnxruntime.InferenceSession`; onnxruntime ships no types."""

    def find_context(self, family: str, case: str, gpu: Gpu) -> KernelContext | None:
        """Return the bias row and spread of a network for a case on a GPU. If formulas predict the case, return None.

        Raises:
            SpecError: the case needs a network and the file has none.
        """
        network = self.description.networks.get(family)
        cases = network.cases if network else ()
        name = next((text for text in (case, *FALLBACKS.get(case, ())) if text in cases), None)
        if network is None or name is None:
            if case in self.description.ceilings:
                return None
            raise SpecError("utilization model", f"was not trained on any {family} kernel: {case}", REMEDY)
        seen = name_die(gpu) in network.seen[name]
        row = network.dies.index(name_die(gpu)) if name_die(gpu) in network.dies else 0
        return KernelContext(row * len(cases) + cases.index(name), network.spread[name].half_width_on(gpu, seen))

    def was_trained_on(self, family: str, case: str, gpu: Gpu) -> bool:
        """Return whether the network of a family was trained on a case on this GPU."""
        network = self.description.networks.get(family)
        return network is not None and name_die(gpu) in network.seen.get(case, ())

    def find_ceiling(self, case: str) -> BandwidthCeiling:
        """Return the fitted ceiling of a case that formulas price."""
        return self.description.ceilings[case]

    def log2_cycles(
        self, inputs: Mapping[str, NetworkInputs], contexts: Mapping[str, npt.NDArray[np.int64]]
    ) -> dict[str, Floats]:
        """Return log2 of the kernels' durations in clock cycles, (N,) for each family, from one call of the runtime.

        Args:
            inputs: inputs of the network of each family.
            contexts: context indexes of each family, (N,).
        """
        feed: dict[str, npt.NDArray[Any]] = {}
        for family, network in self.description.networks.items():
            # The runtime computes every family; one without inputs gets a single row of zeros.
            asked = inputs.get(family) or network.build_empty_inputs()
            feed[f"{family}_columns"] = np.ascontiguousarray(asked.columns, np.float32)
            feed[f"{family}_context"] = np.asarray(contexts.get(family, np.zeros(1)), np.int64)
            if network.details:
                feed[f"{family}_details"] = np.ascontiguousarray(asked.details, np.float32)
        families = [family for family in self.description.networks if family in inputs]
        outputs = self.session.run([f"{family}_log2_cycles" for family in families], feed)
        return {family: values.astype(np.float64) for family, values in zip(families, outputs, strict=True)}


_model, _model_sha256 = "", ""


def use_model(path: str, sha256: str = "") -> None:
    """Use the model file at `path` instead of the shipped file, and refuse it if its SHA-256 is not `sha256`.

    An empty `path` keeps the shipped file, and an empty `sha256` skips the check. A program calls this function once,
    where it starts.
    """
    global _model, _model_sha256
    _model, _model_sha256 = path, sha256


def load_model(path: Path | None = None) -> UtilizationModel:
    """Return the model in the file at `path`.

    Without a path, return the model that `use_model` chose, or else the shipped model.

    Raises:
        SpecError: the file cannot be read, is not ONNX, is not a model of this format, or has another digest than
            `use_model` stated.
    """
    return _load_file(Path(_model), _model_sha256) if path is None and _model else _load_file(path, "")


@cache
def _load_file(path: Path | None, sha256: str) -> UtilizationModel:
    source = path if path is not None else files("tilecast.kernels").joinpath("weights", "utilization.onnx")
    name = str(path) if path is not None else "the shipped utilization.onnx"
    try:
        data = source.read_bytes()
    except OSError as error:
        raise SpecError("utilization model", f"{name} cannot be read: {error.strerror or error}", REMEDY) from None
    digest = hashlib.sha256(data).hexdigest()
    if sha256 and digest != sha256:
        problem = f"{name} has SHA-256 {digest[:12]}…, not {sha256[:12]}… as {MODEL_SHA256} states"
        raise SpecError("utilization model", problem, "mount the file that was meant, or state its digest")
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # stops onnxruntime's reports to its maker; read at import
    import onnxruntime  # takes a third of a second, so it is imported only when needed

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.use_deterministic_compute = True
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime raises half a dozen unrelated types for a bad file
        first = str(error).splitlines()[0][:120]
        raise SpecError("utilization model", f"{name} is not a usable ONNX file ({first})", REMEDY) from None
    metadata = session.get_modelmeta().custom_metadata_map
    if metadata.get("format") != FORMAT:
        version = metadata.get("format", "no format")
        raise SpecError("utilization model", f"{name} states {version!r}, not {FORMAT!r}", REMEDY)
    try:
        description = ModelDescription.model_validate(json.loads(metadata["description"]) | {"format": FORMAT})
    except (KeyError, ValueError, ValidationError):
        raise SpecError("utilization model", f"{name} has a damaged description", REMEDY) from None
    _check_networks(description, session, name)
    return UtilizationModel(description, digest, session)


def _check_networks(description: ModelDescription, session: Any, name: str) -> None:
    """Raise SpecError unless the file's networks have the inputs and outputs that its metadata describe."""
    inputs = {item.name: item.shape for item in session.get_inputs()}
    outputs = {item.name for item in session.get_outputs()}
    for kind, network in description.networks.items():
        width = len(network.columns)
        lengths = {len(network.mean), len(network.scale), len(network.low), len(network.high)}
        shape = inputs.get(f"{kind}_columns", [])
        complete = f"{kind}_context" in inputs and f"{kind}_log2_cycles" in outputs and network.dies[:1] == ("",)
        details = inputs.get(f"{kind}_details", [None, 0])[-1] == network.details
        stacked = len(shape) == 3 and shape[0] == 1 + network.doubled and shape[2] == width
        if lengths != {width} or not (stacked and details and complete):
            raise SpecError("utilization model", f"{name}: the {kind} network does not fit its description", REMEDY)
