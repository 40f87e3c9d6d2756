"""Build the model to trace, from a user's function or from timm, without initialising large weights."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilecast.spec import SpecError

TIMM = "timm/"
"""Prefix of targets that name a model of timm."""
TIMM_BATCH = 2
"""Batch size with which timm's models are traced. Sizes are scaled from it."""
LARGEST_FILLED = 4096
"""Most elements of an array that is filled. Larger float arrays are weights, whose values are not read."""


class BuildError(SpecError):
    """An error that the user's `build()` raised."""


def call_build(build: Callable[[], Any], target: str) -> tuple[Any, tuple[Any, ...]]:
    """Return the module and the tuple of inputs that a call of `build()` returns.

    Raises:
        BuildError: `build()` failed.
        SpecError: the result of `build()` is not a module with tensors.
    """
    import torch

    try:
        module, inputs = build()
    except Exception as error:
        problem = f"build() failed: {summarize_error(error)}"
        raise BuildError(target, problem, "let it return (module, inputs)") from None
    inputs = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    if not isinstance(module, torch.nn.Module) or not any(isinstance(one, torch.Tensor) for one in inputs):
        raise SpecError(target, "build() did not return (module, inputs)", "return a Module and a tuple of tensors")
    return module, inputs


def skip_tensor_filling() -> Any:
    """Return a context in which PyTorch's in-place filling methods do nothing on large floating-point tensors.

    The memory pages of weights are then never written. Weights take no physical memory and no time to initialise.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    skipped = {
        getattr(torch.Tensor, name)
        for name in ("normal_", "uniform_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_", "copy_", "div_")
    }

    class Unfilled(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            first: Any = args[0] if args else None
            if func in skipped and first.is_floating_point() and first.numel() > LARGEST_FILLED:
                return first
            return func(*args, **(kwargs or {}))

    return Unfilled()


def summarize_error(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def import_builder(target: str) -> Callable[[], Any]:
    """Return the function that MODULE:FUNCTION names.

    Raises:
        SpecError: the target names no function, or cannot be imported.
    """
    name, _, function = target.partition(":")
    if not (name and function):
        raise SpecError(target, "names no function", "write MODULE:FUNCTION, for instance my_module:build")
    sys.path.insert(0, str(Path.cwd()))
    try:
        builder = getattr(importlib.import_module(name), function)
    except Exception as error:
        problem = f"cannot be imported: {summarize_error(error)}"
        raise SpecError(target, problem, "run it where Python finds it") from None
    finally:
        sys.path.pop(0)
    if not callable(builder):
        raise SpecError(target, "is not a function", "name one that returns (module, inputs)")
    made: Callable[[], Any] = builder
    return made


def find_timm_builder(target: str) -> Callable[[], Any]:
    """Return a function that builds timm's model `timm/NAME` or `timm/NAME@SIZE`.

    Raises:
        SpecError: timm is missing or has no such model, or SIZE is not a size.
    """
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        raise SpecError(target, "needs timm", "run `pip install 'tilecast[vision]'`") from None
    import torch

    name, _, size = target.removeprefix(TIMM).partition("@")
    if size and not (size.isdecimal() and int(size)):
        raise SpecError(target, f"{size!r} is no size of images", "write timm/NAME@SIZE, the size in pixels")
    if not timm.is_model(name):
        raise SpecError(target, "timm has no such model", "name one of timm.list_models()")

    def build() -> tuple[Any, tuple[Any, ...]]:
        sized: tuple[dict[str, int], ...] = ({"img_size": int(size)}, {}) if size else ({},)
        for options in sized:
            try:
                made = timm.create_model(name, **options)
            except TypeError:  # the model takes images of any size and has no option for it
                continue
            break
        channels, _, side = made.default_cfg["input_size"]
        side = int(size) if size else side
        return made.train(), (torch.zeros(TIMM_BATCH, channels, side, side),)

    return build
