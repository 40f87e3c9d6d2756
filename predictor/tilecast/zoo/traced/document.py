"""Read and write traces as JSON documents.

`tilecast trace` writes such a document, and `tilecast advise` reads it without torch or onnx.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from tilecast.spec import SpecError
from tilecast.trace import Trace, TraceOperator
from tilecast.zoo.traced.normal import normalize
from tilecast.zoo.traced.operators import OPERATORS

FORMAT = "tilecast-graph/1"
MOST_OPERATORS = 100_000
LARGEST = 2**40
_REMEDY = "write the document anew with `tilecast trace`"
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "matmul": ("batch", "rows", "columns", "depth"),
    "attention": ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim"),
    "layernorm": ("cols",),
    "rmsnorm": ("cols",),
    "softmax": ("cols",),
    "loss": ("cols",),
}
"""Attributes that an operator of each kind must have to be priced. A transposition also needs one for each axis."""
_INPUTS: Mapping[str, int] = {"matmul": 2, "convolution": 2, "attention": 3, "constant": 0}
"""Least number of inputs of an operator, for kinds where it is not one."""


def is_document(value: Mapping[str, Any]) -> bool:
    """Return whether a JSON value looks like the document of a trace."""
    return str(value.get("format", "")).startswith("tilecast-graph")


def write(trace: Trace) -> str:
    """Return the JSON document of a trace as text, with one operator per line."""
    head = {
        "format": FORMAT,
        "batch": trace.batch,
        "sequence": trace.sequence,
        "inputs": trace.inputs,
        "parameters": trace.parameters,
        "outputs": trace.outputs,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    shapes = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in trace.shapes.items())
    rows = ([one.kind, one.inputs, one.outputs, dict(one.attributes)] for one in trace.operators)
    operators = ",\n".join(map(json.dumps, rows))
    return "{" + ",\n".join([*lines, f'"shapes": {{\n{shapes}\n}}', f'"operators": [\n{operators}\n]']) + "}\n"


def read(value: Mapping[str, Any], name: str) -> Trace:
    """Return the trace in a document, with its layers found by `normalize`.

    Args:
        value: the JSON value.
        name: name of the file in messages.

    Raises:
        SpecError: the document has another version, lacks a part, or fails `_check`.
    """
    if value.get("format") != FORMAT:
        raise SpecError(f"{name}: format", f"{value.get('format')!r} is not {FORMAT}", _REMEDY)
    try:
        trace = Trace(
            batch=_check_size(value["batch"]),
            sequence=_check_size(value["sequence"]),
            inputs=_check_names(value["inputs"]),
            parameters=_check_names(value["parameters"]),
            outputs=_check_names(value["outputs"]),
            shapes={str(key): tuple(_check_size(size) for size in shape) for key, shape in value["shapes"].items()},
            operators=tuple(
                TraceOperator(
                    str(kind),
                    _check_names(inputs),
                    _check_names(outputs),
                    {str(k): float(v) for k, v in attributes.items()},
                )
                for kind, inputs, outputs, attributes in value["operators"]
            ),
        )
    except KeyError as error:
        raise SpecError(f"{name}: {error.args[0]}", "is missing", _REMEDY) from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SpecError(name, f"is not a graph document: {str(error)[:80]}", _REMEDY) from None
    return check_and_normalize(trace, name)


def refuse_unknown_operators(unknown: Counter[str], supported: Collection[str], name: str) -> None:
    """Raise SpecError if a program has operators that cannot be converted.

    `unknown` has the number of occurrences of each such operator.
    """
    if unknown:
        listed = ", ".join(f"{operator} ({count}x)" for operator, count in unknown.most_common(8))
        problem = f"has operators that Tilecast does not know: {listed}"
        raise SpecError(name, problem, f"supported: {', '.join(sorted(supported))}")


def check_and_normalize(trace: Trace, name: str) -> Trace:
    """Return a trace with its layers found. `name` is the name of its source in messages.

    Raises:
        SpecError: the trace fails `_check`.
    """
    _check(trace, name)
    return normalize(trace)


def _check(trace: Trace, name: str) -> None:
    """Raise SpecError if a trace cannot be priced.

    Raises:
        SpecError: there are no operators or too many, a kind is unknown, an input has no origin, a shape or an
            attribute is missing or does not fit, the samples are not a batch, or no output is computed from them.
    """
    if not 1 <= len(trace.operators) <= MOST_OPERATORS:
        raise SpecError(f"{name}: operators", f"there are {len(trace.operators)}", f"give 1 to {MOST_OPERATORS}")
    for source, shape in trace.shapes.items():
        if prod(shape) > LARGEST:
            raise SpecError(f"{name}: shapes", f"{source!r} is larger than any tensor", _REMEDY)
    known = {"", *trace.inputs, *trace.parameters}
    # Constants that no operator makes appear in `shapes` only.
    made = {output for one in trace.operators for output in one.outputs}
    known |= trace.shapes.keys() - made
    for position, one in enumerate(trace.operators):
        field = f"{name}: operators[{position}]"
        if one.kind not in OPERATORS:
            raise SpecError(field, f"unknown kind {one.kind!r}", f"known: {', '.join(OPERATORS)}")
        if missing := [source for source in one.inputs if source not in known]:
            raise SpecError(field, f"nothing makes its input {missing[0]!r}", _REMEDY)
        known.update(one.outputs)
        if lost := [each for each in (*one.inputs, *one.outputs) if each and each not in trace.shapes]:
            raise SpecError(field, f"the shape of {lost[0]!r} is not given", _REMEDY)
        if not one.outputs or len([source for source in one.inputs if source]) < _INPUTS.get(one.kind, 1):
            raise SpecError(field, f"{one.kind} lacks inputs or outputs", _REMEDY)
        for attribute in _NEEDED.get(one.kind, ()):
            if not 1 <= one.attributes.get(attribute, 0) <= LARGEST:
                raise SpecError(field, f"{one.kind} lacks the attribute {attribute}", _REMEDY)
        axes = range(len(trace.shapes[one.inputs[0]])) if one.kind == "transpose" else range(0)
        for axis in axes:
            if one.attributes.get(f"axis{axis}") not in axes:
                raise SpecError(field, f"{one.kind} lacks the attribute axis{axis}", _REMEDY)
        if one.kind == "convolution" and not _has_convolution_shapes(trace, one):
            raise SpecError(field, "its image, weight and output are not of one rank from 3 to 5", _REMEDY)
        if one.kind == "convolution" and not _divides_channels(trace, one):
            raise SpecError(field, "groups is no whole number that divides the channels in and out", _REMEDY)
    for source in (*trace.inputs, *trace.parameters, *trace.outputs):
        if source not in trace.shapes:
            raise SpecError(f"{name}: shapes", f"the shape of {source!r} is not given", _REMEDY)
    _check_inputs_and_outputs(trace, name)


def _check_inputs_and_outputs(trace: Trace, name: str) -> None:
    """Raise SpecError unless the first input with dimensions is a batch, and an output is computed from the samples.

    A further input may have another first dimension. It is then the same for every sample.
    """
    first = next((source for source in trace.inputs if trace.shapes[source]), None)
    if first is None:
        raise SpecError(f"{name}: inputs", "none has a batch dimension", "let the first dimension be the batch")
    if trace.shapes[first][0] != trace.batch:
        problem = f"{trace.batch} is not the first dimension of {first!r}, which is {trace.shapes[first][0]}"
        raise SpecError(f"{name}: batch", problem, _REMEDY)
    if not trace.outputs:
        raise SpecError(f"{name}: outputs", "there are none", "name what the model answers")
    varying = {source for source in trace.inputs if trace.shapes[source][:1] == (trace.batch,)}
    computed: set[str] = set()
    for one in trace.operators:
        if one.kind != "constant" and not varying.isdisjoint(one.inputs):
            varying.update(one.outputs)
            # A view of a sample launches no kernel, so a model of views alone has no price.
            if OPERATORS[one.kind].moves or not computed.isdisjoint(one.inputs):
                computed.update(one.outputs)
    if computed.isdisjoint(trace.outputs):
        raise SpecError(f"{name}: outputs", "none is computed from the inputs", "name what the model answers")


def _has_convolution_shapes(trace: Trace, operator: TraceOperator) -> bool:
    ranks = {len(trace.shapes[each]) for each in (*operator.inputs[:2], operator.outputs[0])}
    return len(ranks) == 1 and ranks <= {3, 4, 5}


def _divides_channels(trace: Trace, operator: TraceOperator) -> bool:
    groups = operator.attributes.get("groups", 1)
    channels = (trace.shapes[operator.inputs[0]][1], trace.shapes[operator.outputs[0]][1])
    return groups >= 1 and groups % 1 == 0 and all(count % groups == 0 for count in channels)


def _check_size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise ValueError(f"{value!r} is no size")
    return value


def _check_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{str(value)[:40]!r} is no list of names")
    return tuple(value)
