"""Trace a `torch.nn.Module` through `torch.export` on fake tensors, without a GPU or memory for the weights.

In a stack of equal layers, two layers are traced and the others are copied. This requires that the modules of all
layers have equal structure, and that the operators of the two traced layers are adjacent and equal. Otherwise all
layers are traced.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from tilecast.spec import SpecError
from tilecast.trace import Shape, Trace, TraceOperator
from tilecast.zoo.traced.document import check_and_normalize, refuse_unknown_operators
from tilecast.zoo.traced.repeats import ExportedTrace, find_stacks, trace_two_layers
from tilecast.zoo.traced.torch_build import (
    TIMM,
    BuildError,
    call_build,
    find_timm_builder,
    import_builder,
    skip_tensor_filling,
    summarize_error,
)
from tilecast.zoo.traced.torch_operators import KINDS, READERS, list_tensors, read_operator_name


def trace(target: str) -> Trace:
    """Return the trace of the model that `target` names.

    Args:
        target: `my_module:build`, where `build()` returns (module, example inputs). Or `timm/NAME` for a model of timm
            in training mode on images of its default size, and `timm/NAME@SIZE` for images of SIZE × SIZE pixels.

    Raises:
        SpecError: torch or timm is missing, the target cannot be imported or built, `torch.export` refuses the module,
            or it has operators that Tilecast does not know.
    """
    try:
        importlib.import_module("torch")
    except ImportError:
        raise SpecError("trace", "needs PyTorch", "run `pip install torch`; the CPU build will do") from None
    return trace_built_model(find_timm_builder(target) if target.startswith(TIMM) else import_builder(target), target)


def trace_built_model(build: Callable[[], Any], target: str) -> Trace:
    """Return the trace of the model that `build()` returns with its example inputs.

    The model is built from fake tensors. This fails if the model reads values of tensors, for instance a drop rate that
    is computed as a tensor. The model is then built from real tensors, whose large weights are never initialised.
    `target` names the model in messages.

    Raises:
        SpecError: the model cannot be built, `torch.export` refuses it, or it has operators that Tilecast does not
            know.
    """
    import torch
    from torch._subclasses import FakeTensorMode  # PyTorch has no public name for it

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), _clone_on_deepcopy():
            return _trace_module(*call_build(build, target), target)
    except BuildError:
        with skip_tensor_filling():
            module, inputs = call_build(build, target)
        return _trace_module(module, inputs, target)


def _trace_module(module: Any, inputs: tuple[Any, ...], target: str) -> Trace:
    for stack in find_stacks(module):
        trace = trace_two_layers(module, stack, lambda: _export_module(module, inputs, target))
        if trace is not None:
            return check_and_normalize(trace, target)
    return check_and_normalize(_export_module(module, inputs, target).trace, target)


def _clone_on_deepcopy() -> Any:
    """Return a context in which `copy.deepcopy` clones a tensor without its attributes.

    PyTorch 2.15 copies the attributes too. One of them is the mode that made a fake tensor. To copy that mode may crash
    the process.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Copied(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.Tensor.__deepcopy__:
                return func(*args, **(kwargs or {}))
            tensor, memo = args
            if id(tensor) not in memo:
                clone, trains = tensor.detach().clone(), tensor.requires_grad
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                memo[id(tensor)] = torch.nn.Parameter(clone, trains) if is_parameter else clone.requires_grad_(trains)
            return memo[id(tensor)]

    return Copied()


def _export_module(module: Any, inputs: tuple[Any, ...], target: str) -> ExportedTrace:
    import torch

    try:
        program = torch.export.export(module, inputs, strict=False)
    except Exception as error:
        remedy = "see torch.export: no data-dependent control flow"
        raise SpecError(target, f"torch.export failed: {summarize_error(error)}", remedy) from None
    _inline_regions(program.graph_module)
    return _ProgramReader(program, target).read()


_REGIONS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")
"""Operators with which `torch.export` runs a region of a program under a context manager."""


def _inline_regions(module: Any) -> None:
    """Replace each call of an operator in `_REGIONS` by the operators of the region that the call runs."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or str(node.target) not in _REGIONS:
            continue
        position, part = next((at, one) for at, one in enumerate(node.args) if getattr(one, "op", "") == "get_attr")
        body = getattr(module, part.target)
        _inline_regions(body)
        asked = [one for one in body.graph.nodes if one.op == "placeholder"]
        with graph.inserting_before(node):
            made = graph.graph_copy(body.graph, dict(zip(asked, node.args[position + 1 :], strict=True)))
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


class _ProgramReader:
    """Reader of an exported program."""

    def __init__(self, program: Any, target: str) -> None:
        self.program = program
        self.target = target
        self.shapes: dict[str, Shape] = {}
        self.operators: list[TraceOperator] = []
        self.paths: list[str] = []
        self.unknown: Counter[str] = Counter()

    def read(self) -> ExportedTrace:
        signature = self.program.graph_signature
        stored = {spec.arg.name: spec.target for spec in signature.input_specs if spec.kind.name == "PARAMETER"}
        asked = {spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT"}
        inputs, parameters, outputs, first = [], [], [], None
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                value = node.meta.get("val")
                if not hasattr(value, "shape"):
                    continue
                self._record_shape(node.name, value)
                if node.name in asked:
                    inputs.append(node.name)
                    first = value if first is None else first
                elif node.name in stored and node.users:
                    parameters.append(node.name)
            elif node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                outputs = [one.name for one in list_tensors(node.args)]
        refuse_unknown_operators(self.unknown, {*KINDS, *READERS}, self.target)
        if first is None or not first.shape:
            problem = "no example input has a batch dimension"
            raise SpecError(self.target, problem, "let the first dimension be the batch")
        is_tokens = not first.is_floating_point() and first.dim() == 2
        trace = Trace(
            batch=int(first.shape[0]),
            sequence=int(first.shape[1]) if is_tokens else 1,
            inputs=tuple(inputs),
            parameters=tuple(parameters),
            outputs=tuple(outputs),
            shapes=self.shapes,
            operators=tuple(self.operators),
        )
        return ExportedTrace(trace, tuple(self.paths))

    def _record_shape(self, name: str, value: Any) -> None:
        try:
            self.shapes[name] = tuple(max(1, int(size)) for size in value.shape)
        except Exception:
            remedy = "size it by the inputs' shapes alone"
            raise SpecError(self.target, f"the shape of {name} depends on data", remedy) from None

    def _read_call(self, node: Any) -> None:
        if node.target.__name__ == "getitem":
            source, position = node.args
            name = f"{source.name}.{position}"
            self._record_shape(node.name, node.meta["val"])
            self._append_operator(node, TraceOperator("part", (name,), (node.name,)))
            return
        value = node.meta.get("val")
        values = [value] if hasattr(value, "shape") else [one for one in value or () if hasattr(one, "shape")]
        if not values:
            return
        names = [node.name] if hasattr(value, "shape") else [f"{node.name}.{index}" for index in range(len(values))]
        for name, one in zip(names, values, strict=True):
            self._record_shape(name, one)
        called = read_operator_name(node)
        inputs = tuple(one.name for one in list_tensors([*node.args, *node.kwargs.values()]))
        if called in READERS:
            kind, inputs, attributes = READERS[called](node, self.shapes)
        elif called in KINDS:
            kind, attributes = KINDS[called], {}
        else:
            self.unknown[called] += 1
            return
        inputs = tuple(name for name in inputs if name in self.shapes)
        if kind != "constant" and not inputs:
            kind = "constant"
        self._append_operator(node, TraceOperator(kind, inputs, tuple(names), attributes))

    def _append_operator(self, node: Any, operator: TraceOperator) -> None:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        self.operators.append(operator)
        self.paths.append(str(stack[-1][0]) if stack else "")
