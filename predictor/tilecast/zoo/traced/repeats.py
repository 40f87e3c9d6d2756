"""Trace a stack of equal layers by tracing only two of them. The other layers are copies of the second one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilecast.spec import SpecError
from tilecast.trace import Trace

FEWEST_LAYERS = 4
"""Least number of layers that is worth copying."""


@dataclass(frozen=True, slots=True)
class ExportedTrace:
    """A trace with the path of each operator's module."""

    trace: Trace
    paths: tuple[str, ...]


def find_stacks(module: Any) -> list[tuple[str, int]]:
    """Return the path and length of each list of layers with equal structure, longest first."""
    import torch

    stacks = []
    for path, part in module.named_modules():
        if not isinstance(part, torch.nn.ModuleList | torch.nn.Sequential) or len(part) < FEWEST_LAYERS:
            continue
        if len({_describe_layer(layer) for layer in part}) == 1:
            stacks.append((path, len(part)))
    return sorted((one for one in stacks if one[0]), key=lambda one: -one[1])


def _describe_layer(layer: Any) -> str:
    """Return text that is the same for two layers that compute in the same way.

    The text has types, options, names and shapes of weights, whether there are hooks, and whether weights are shared.
    """
    parts = []
    for path, part in layer.named_modules():
        plain = {key: value for key, value in vars(part).items() if not key.startswith("_")}
        weights = [(name, tuple(one.shape)) for name, one in part.named_parameters(recurse=False)]
        hooked = bool(part._forward_hooks or part._forward_pre_hooks)
        parts.append(f"{path} {type(part)} {sorted(plain.items(), key=lambda one: one[0])!r} {weights} {hooked}")
    shared = len(list(layer.parameters())) != sum(len(list(p.parameters(recurse=False))) for p in layer.modules())
    return "\n".join([*parts, str(shared)])


def trace_two_layers(module: Any, stack: tuple[str, int], export: Callable[[], ExportedTrace]) -> Trace | None:
    """Return the trace of a model in which only two layers of a stack were traced and the others are copies.

    Args:
        module: the model. Its stack is shortened during the call and restored afterwards.
        stack: path and length of the stack.
        export: function that traces the module as it is.

    Returns:
        The trace, or None if copying is not safe.
    """
    import torch

    path, count = stack
    parent_path, _, name = path.rpartition(".")
    parent = module.get_submodule(parent_path)
    layers = getattr(parent, name)
    weights = [id(one) for layer in layers for one in layer.parameters()]
    if len(set(weights)) != len(weights):
        return None
    two = list(layers)[:2]
    setattr(parent, name, type(layers)(two) if isinstance(layers, torch.nn.ModuleList) else type(layers)(*two))
    try:
        short = export()
    except SpecError as error:
        if "does not know" in error.problem:
            raise
        return None
    finally:
        setattr(parent, name, layers)
    return _repeat_second_layer(short, path, count - 2)


def _repeat_second_layer(short: ExportedTrace, path: str, copies: int) -> Trace | None:
    """Return a trace with two layers of a stack, extended by `copies` copies of the second layer.

    `path` is the path of the stack in the model. If the two layers differ or are not adjacent, return None.
    """
    first, second = (
        [at for at, where in enumerate(short.paths) if f"{where}.".startswith(f"{path}.{number}.")] for number in (0, 1)
    )
    trace_ = short.trace
    if not first or len(first) != len(second) or second != list(range(first[-1] + 1, first[-1] + 1 + len(second))):
        return None
    if first != list(range(first[0], first[-1] + 1)):
        return None
    same: dict[str, str] = {}
    parameters = set(trace_.parameters)
    for before, after in zip(first, second, strict=True):
        one, two = trace_.operators[before], trace_.operators[after]
        if (one.kind, one.attributes) != (two.kind, two.attributes):
            return None
        if (len(one.inputs), len(one.outputs)) != (len(two.inputs), len(two.outputs)):
            return None
        for left, right in zip((*one.inputs, *one.outputs), (*two.inputs, *two.outputs), strict=True):
            if trace_.shapes.get(left) != trace_.shapes.get(right) or same.setdefault(right, left) != left:
                return None
    made = {name for at in first for name in trace_.operators[at].outputs}
    for right, left in same.items():
        is_own = (right in parameters and left in parameters) or right == left
        if not is_own and right not in made and not any(right in trace_.operators[at].outputs for at in second):
            return None
    shapes, operators = dict(trace_.shapes), list(trace_.operators[: second[-1] + 1])
    weights = list(trace_.parameters)
    latest = {name: name for name in same}
    own = [name for name in same if name in parameters and same[name] != name]
    for number in range(copies):
        # Where the second layer reads the first one, a copy reads the layer before it.
        names = {right: latest[back] for right in same if (back := _find_counterpart(right, same, made)) is not None}
        fresh = {name: f"{name}#{number + 3}" for name in own}
        weights += list(fresh.values())
        fresh |= {name: f"{name}#{number + 3}" for at in second for name in trace_.operators[at].outputs}
        names |= fresh
        shapes |= {new: trace_.shapes[old] for old, new in fresh.items()}
        for at in second:
            one = trace_.operators[at]
            operators.append(
                replace(
                    one,
                    inputs=tuple(names.get(name, name) for name in one.inputs),
                    outputs=tuple(names.get(name, name) for name in one.outputs),
                )
            )
        latest = {name: fresh.get(name, latest[name]) for name in latest}
    rest = trace_.operators[second[-1] + 1 :]
    if any(name in made for name in (*trace_.outputs, *(source for one in rest for source in one.inputs))):
        return None
    operators += [replace(one, inputs=tuple(latest.get(name, name) for name in one.inputs)) for one in rest]
    outputs = tuple(latest.get(name, name) for name in trace_.outputs)
    return replace(trace_, shapes=shapes, operators=tuple(operators), parameters=tuple(weights), outputs=outputs)


def _find_counterpart(name: str, same: Mapping[str, str], first_outputs: set[str]) -> str | None:
    """Return the second layer's tensor that corresponds to the tensor `name` of the first layer, or None."""
    if name not in first_outputs:
        return None
    return next((right for right, left in same.items() if left == name), None)
