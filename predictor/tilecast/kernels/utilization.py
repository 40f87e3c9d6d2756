"""The model file, an ONNX file with the neural networks for kernels and the bandwidth limits of other kernels.

Only this module uses onnxruntime. The metadata of the file contain, as JSON:

* the columns that each network expects, with names, order, scaling and the range in training;
* the cases and GPUs of the training data;
* the fitted bandwidth limits of kernels without a network, and the spreads of all predictions.

The metadata are checked when the file is loaded. A file of another program or a damaged file is refused.

Each network maps the columns of `features` to log2 of the kernel's duration in clock cycles. Its weights on the columns
are non-negative and its activations are non-decreasing, so a larger column never shortens a kernel. A bias stands for
the case and the GPU. The context index selects the bias.

The networks of GEMMs also read details, which may raise or lower a time. Their effect is at most a fraction of the
smallest time that doubling a dimension adds. So doubling a dimension still never shortens a kernel.
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
"""Environment variables with the path of a model file to use instead of the shipped file, and with its SHA-256."""
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
"""Cases to use instead of a case that is not in the training data, by that case. The most similar case comes first."""


class _ModelFilePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(_ModelFilePart):
    """Relative half-widths of the 90 % intervals of predicted durations."""

    seen: float
    """Half-width on dies in the training data."""
    unseen: float
    """Half-width on other dies."""
    dies: Mapping[str, float] = {}
    """Half-width by die, for dies with enough measured samples."""

    def find_half_width(self, gpu: Gpu, was_measured: bool) -> float:
        """Return the half-width on a GPU. `was_measured` says whether the GPU's die is in the training data."""
        return self.dies.get(name_die(gpu), self.seen) if was_measured else self.unseen


class TrainedNetwork(_ModelFilePart):
    """Inputs and training data of one network in the model file.

    A context index is `dies.index(die) * len(cases) + cases.index(case)`.
    """

    columns: tuple[str, ...]
    """Names of the columns, in the order in which the network reads them."""
    mean: tuple[float, ...]
    """Mean of each column in the training data."""
    scale: tuple[float, ...]
    """Scale of each column in the training data."""
    low: tuple[float, ...]
    """Smallest value of each column in the training data."""
    high: tuple[float, ...]
    """Largest value of each column in the training data."""
    cases: tuple[str, ...]
    """Cases in the training data."""
    dies: tuple[str, ...]
    """Dies in the training data. The first die has an empty name, and stands for all other GPUs."""
    seen: Mapping[str, tuple[str, ...]]
    """Dies that were measured in a case, by case. On other dies the spread of the case is `Spread.unseen`."""
    spread: Mapping[str, Spread]
    """Spread of predictions by case."""
    doubled: int = 0
    """Number of dimensions that are doubled in the network's inputs. It is 0 if the network has no details."""
    details: int = 0
    """Number of details in the network's inputs."""

    def build_empty_inputs(self) -> NetworkInputs:
        """Return the inputs of one kernel whose columns are all zero."""
        return NetworkInputs(
            self.columns, np.zeros((1 + self.doubled, 1, len(self.columns))), np.zeros((1, self.details))
        )


class BandwidthCeiling(_ModelFilePart):
    """Fitted constants of `formulas` for one case of kernels that bandwidth bounds."""

    ramp_s: float
    """Duration of a kernel that moves no bytes."""
    dram_share: float
    """Fraction of the DRAM bandwidth that kernels reach."""
    l2_share: float
    """Fraction of the L2 bandwidth that kernels reach."""
    sm_bytes_per_clock: float
    """Bytes of a row that one SM streams per clock cycle."""
    row_cycles: float
    """Fewest clock cycles of an SM per row."""
    extra_passes: float
    """Traffic of the second and later reads of a row, relative to the least traffic."""
    resident_row_bytes: float
    """Bytes of the largest row that is read only once."""
    reuse_share: float
    """Fraction of the L2 that the rows in flight may fill before later reads miss the cache."""
    spread: Spread
    """Spread of predictions."""
    dies: Mapping[str, float] = {}
    """Factor on `dram_share`, by die, for the dies in the training data."""


class ModelDescription(_ModelFilePart):
    """The metadata of a model file, with the networks by name and the bandwidth limits by case."""

    format: str
    version: str
    networks: Mapping[str, TrainedNetwork]
    ceilings: Mapping[str, BandwidthCeiling]


def name_die(gpu: Gpu) -> str:
    """Return the name of a GPU's die, made of compute capability and SM count, for instance `9x132`."""
    return f"{gpu.compute_capability:g}x{gpu.sm_count}"


@dataclass(frozen=True, slots=True)
class KernelContext:
    """Bias of a network for one die and one case, and the spread of its predictions."""

    index: int
    """Row of the bias in the tables of the network."""
    spread: float
    """Relative half-width of the interval that contains 90 % of the measurements."""


@dataclass(frozen=True, slots=True)
class UtilizationModel:
    """A model file that is loaded, with an ONNX runtime session that evaluates its networks."""

    description: ModelDescription
    sha256: str
    session: Any
    """An `onnxruntime.InferenceSession`, for which onnxruntime has no type annotations."""

    def find_context(self, family: str, case: str, gpu: Gpu) -> KernelContext | None:
        """Return the bias row and the spread of a family's network for a case on a GPU.

        If formulas predict the case, return None.

        Raises:
            SpecError: the file has neither a network nor a bandwidth limit for the case.
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
        return KernelContext(row * len(cases) + cases.index(name), network.spread[name].find_half_width(gpu, seen))

    def was_trained_on(self, family: str, case: str, gpu: Gpu) -> bool:
        """Return whether the training data of a family's network contain a case on a GPU's die."""
        network = self.description.networks.get(family)
        return network is not None and name_die(gpu) in network.seen.get(case, ())

    def find_ceiling(self, case: str) -> BandwidthCeiling:
        """Return the fitted bandwidth limits of a case that formulas predict."""
        return self.description.ceilings[case]

    def predict_log2_cycles(
        self, inputs: Mapping[str, NetworkInputs], contexts: Mapping[str, npt.NDArray[np.int64]]
    ) -> dict[str, Floats]:
        """Return log2 of the predicted durations of kernels in clock cycles, (N,), by family.

        Args:
            inputs: inputs of the network for N kernels, by family.
            contexts: context index of each kernel, (N,), by family.
        """
        feed: dict[str, npt.NDArray[Any]] = {}
        for family, network in self.description.networks.items():
            # The runtime evaluates every network, so a network without inputs gets a single row of zeros.
            asked = inputs.get(family) or network.build_empty_inputs()
            feed[f"{family}_columns"] = np.ascontiguousarray(asked.columns, np.float32)
            feed[f"{family}_context"] = np.asarray(contexts.get(family, np.zeros(1)), np.int64)
            if network.details:
                feed[f"{family}_details"] = np.ascontiguousarray(asked.details, np.float32)
        families = [family for family in self.description.networks if family in inputs]
        outputs = self.session.run([f"{family}_log2_cycles" for family in families], feed)
        return {family: values.astype(np.float64) for family, values in zip(families, outputs, strict=True)}


_model, _model_sha256 = "", ""


def set_default_model(path: str, sha256: str = "") -> None:
    """Set the model file that `load_model` loads by default, and its expected SHA-256.

    An empty `path` keeps the shipped file. An empty `sha256` skips the check. A program calls this once, at its start.
    """
    global _model, _model_sha256
    _model, _model_sha256 = path, sha256


def load_model(path: Path | None = None) -> UtilizationModel:
    """Return the model in the file at `path`.

    Without a path, return the model that `set_default_model` set. If it set none, return the shipped model.

    Raises:
        SpecError: the file cannot be read, is not ONNX, or is not a model of this format. The SHA-256 of the file
            differs from the one that `set_default_model` set.
    """
    return _load_file(Path(_model), _model_sha256) if path is None and _model else _load_file(path, "")


@cache
def _load_file(path: Path | None, sha256: str) -> UtilizationModel:
    """Return the model in a file, or the shipped model if `path` is None. An empty `sha256` is not checked."""
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
    """Raise SpecError if inputs or outputs of a network differ from the description in the file's metadata."""
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
