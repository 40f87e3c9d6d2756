"""Find layers that exporters and model code split into several operators: biases, norms, activations and attention.

Each pass looks for one pattern of operators and replaces it with a single operator, so that a decomposed layer is
priced as the kernel that a framework has for it. Operators that no pass recognises stay as traced. `normalize` runs all
passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from tilecast.trace import Trace, TraceOperator
from tilecast.zoo.traced.operators import OPERATORS

_ACTIVATIONS: Mapping[str, str] = {"erf": "gelu", "tanh": "gelu", "sigmoid": "silu"}
_LONGEST_ACTIVATION = 10


@dataclass(frozen=True, slots=True)
class LayerMatch:
    """Indices of operators to replace, and the single operator that replaces them."""

    replaced: frozenset[int]
    operator: TraceOperator


class TraceIndex:
    """A trace, with an index of the operators that write and read each tensor."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.operators = trace.operators
        self.maker = {name: index for index, one in enumerate(trace.operators) for name in one.outputs}
        self.readers: dict[str, list[int]] = defaultdict(list)
        self.parameters = set(trace.parameters)
        self.varying, self.learned = set(trace.inputs), set(trace.parameters)
        for index, one in enumerate(trace.operators):
            for name in one.inputs:
                self.readers[name].append(index)
            for known in (self.varying, self.learned):
                if one.kind != "constant" and not known.isdisjoint(one.inputs):
                    known.update(one.outputs)

    def find_maker(self, name: str, *kinds: str) -> int | None:
        """Return the index of the operator that computes a tensor, or None if it is not of one of `kinds`.

        Casts between the operator and the tensor are ignored.
        """
        index = self.maker.get(name)
        while index is not None and self.operators[index].kind == "cast":
            index = self.maker.get(self.operators[index].inputs[0])
        return index if index is not None and self.operators[index].kind in kinds else None

    def skip_casts(self, name: str) -> str:
        """Return the tensor from which a chain of casts makes `name`. If no cast makes `name`, return `name`."""
        while (index := self.maker.get(name)) is not None and self.operators[index].kind == "cast":
            name = self.operators[index].inputs[0]
        return name

    def find_only_reader(self, name: str, *kinds: str) -> int | None:
        """Return the index of the only operator that reads a tensor, or None if there are several.

        Casts between the tensor and the operator are ignored. If the operator is not of one of `kinds`, return None.
        """
        while len(set(self.readers[name])) == 1 and name not in self.trace.outputs:
            index = self.readers[name][0]
            one = self.operators[index]
            if one.kind != "cast":
                return index if one.kind in kinds else None
            name = one.outputs[0]
        return None

    def find_other_input(self, index: int, name: str) -> str | None:
        """Return the other input of an operator that reads `name` and exactly one other tensor.

        If the operator has another number of inputs or does not read `name`, return None.
        """
        inputs = [self.skip_casts(one) for one in self.operators[index].inputs if one]
        if len(inputs) != 2 or self.skip_casts(name) not in inputs:
            return None
        inputs.remove(self.skip_casts(name))
        return inputs[0]

    def has_no_other_reader(self, replaced: set[int], output: str) -> bool:
        """Return whether only the `replaced` operators read each other's outputs.

        Other operators may still read the tensor `output`.
        """
        for index in replaced:
            for name in self.operators[index].outputs:
                if name != output and (name in self.trace.outputs or not self._is_read_only_by(name, replaced)):
                    return False
        return True

    def _is_read_only_by(self, name: str, replaced: set[int]) -> bool:
        return all(
            index in replaced
            or (
                self.operators[index].kind == "cast"
                and self._is_read_only_by(self.operators[index].outputs[0], replaced)
            )
            for index in self.readers[name]
        )


def _match_bias(index: TraceIndex, position: int) -> LayerMatch | None:
    """Return the match of a matrix product at `position` and the sum that adds a parameter vector to it, or None."""
    product = index.operators[position]
    if product.kind != "matmul" or len(product.inputs) != 2:
        return None
    output = product.outputs[0]
    sum_ = index.find_only_reader(output, "add")
    vector = index.find_other_input(sum_, output) if sum_ is not None else None
    if sum_ is None or vector is None or index.trace.shapes[vector] != index.trace.shapes[output][-1:]:
        return None
    if vector not in index.parameters:
        return None
    outputs = index.operators[sum_].outputs
    return LayerMatch(frozenset({position, sum_}), replace(product, inputs=(*product.inputs, vector), outputs=outputs))


def _match_norm(index: TraceIndex, position: int) -> LayerMatch | None:
    """Return the match of x / sqrt(mean(x^2) + epsilon), with an optional weight and bias, or None.

    x may be the difference of a tensor from its mean.
    """
    root = index.operators[position]
    if root.kind not in ("root", "reciprocal-root"):
        return None
    steps = [position]
    name = root.inputs[0]
    for kinds in (("add",), ("reduction",), ("power", "multiply")):
        maker = index.find_maker(name, *kinds)
        if maker is None:
            return None
        steps.append(maker)
        name = next((one for one in index.operators[maker].inputs if one in index.varying), "")
    _, _, mean, square = steps
    centred = index.skip_casts(name)
    source, kind = centred, "rmsnorm"
    if (less := index.find_maker(centred, "add")) is not None:
        candidates = [one for one in index.operators[less].inputs if one]
        averaged = next((one for one in candidates if index.find_maker(one, "reduction") is not None), None)
        if averaged is not None and (plain := index.find_other_input(less, averaged)) is not None:
            average = index.find_maker(averaged, "reduction")
            if average is not None and index.skip_casts(index.operators[average].inputs[0]) == plain:
                source, kind = plain, "layernorm"
                steps += [less, average]
    output = root.outputs[0]
    if (inverse := index.find_only_reader(output, "from-output")) is not None:
        steps.append(inverse)
        output = index.operators[inverse].outputs[0]
    scaled = index.find_only_reader(output, "multiply")
    if scaled is None or index.find_other_input(scaled, output) != centred:
        return None
    steps.append(scaled)
    output = index.operators[scaled].outputs[0]
    learned: list[str] = []
    for kind_ in ("multiply", "add"):
        further = index.find_only_reader(output, kind_)
        vector = index.find_other_input(further, output) if further is not None else None
        if further is None or vector not in index.parameters:
            break
        learned.append(vector)
        steps.append(further)
        output = index.operators[further].outputs[0]
    shapes = index.trace.shapes
    cols = prod(shapes[index.operators[square].outputs[0]]) // prod(shapes[index.operators[mean].outputs[0]])
    if not index.has_no_other_reader(set(steps), output):
        return None
    return LayerMatch(frozenset(steps), TraceOperator(kind, (source, *learned), (output,), {"cols": cols}))


def _match_activation(index: TraceIndex, position: int) -> LayerMatch | None:
    """Return the match of the operators of an activation that is written out with erf, tanh or a sigmoid, or None.

    These operators are the smallest set of element-wise operators that contains the one at `position`, reads one tensor
    in two places, and writes one tensor.
    """
    anchor = index.operators[position]
    if anchor.kind not in _ACTIVATIONS:
        return None
    front, candidates = [anchor.inputs[0]], list[str]()
    while front and len(candidates) < _LONGEST_ACTIVATION:
        name = front.pop(0)
        candidates.append(name)
        maker = index.maker.get(name)
        if maker is not None and OPERATORS[index.operators[maker].kind].chained:
            front += [one for one in index.operators[maker].inputs if one in index.varying and one not in candidates]
    for source in candidates:
        region = _find_fused_region(index, source, position)
        if region is not None:
            output = index.operators[max(region)].outputs[0]
            return LayerMatch(frozenset(region), TraceOperator(_ACTIVATIONS[anchor.kind], (source,), (output,)))
    return None


def _find_fused_region(index: TraceIndex, source: str, anchor: int) -> set[int] | None:
    """Return the indices of the element-wise operators that compute a single output from `source`, or None.

    The `anchor` must be among them, and one of them must join two tensors that were computed from `source`.
    """
    inner, region = {source}, set[int]()
    pending = sorted(set(index.readers[source]))
    joined = False
    while pending and len(region) <= _LONGEST_ACTIVATION:
        at = pending.pop(0)
        one = index.operators[at]
        varying = [name for name in one.inputs if name in index.varying]
        if not OPERATORS[one.kind].chained or not set(varying) <= inner:
            continue
        region.add(at)
        inner.update(one.outputs)
        joined = joined or len(varying) > 1
        pending = sorted(set(pending) | set(index.readers[one.outputs[0]]))
        if joined and anchor in region and index.has_no_other_reader(region, one.outputs[0]):
            last = _find_constant_factor(index, one.outputs[0])
            return region | ({last} if last is not None else set())
    return None


def _find_constant_factor(index: TraceIndex, name: str) -> int | None:
    """Return the index of the operator that multiplies a tensor by a constant, such as the half in an exact GELU.

    If there is no such operator, return None.
    """
    follows = index.find_only_reader(name, "multiply", "scale")
    if follows is None:
        return None
    constant = all(one in index.readers and one not in index.varying and one not in index.parameters
                   for one in index.operators[follows].inputs if one != name)  # fmt: skip
    return follows if constant else None


def _match_attention(index: TraceIndex, position: int) -> LayerMatch | None:
    """Return the match of two matrix products with the softmax at `position` between them, or None.

    Scales, masks and dropout may also be between the products.
    """
    softmax, shapes = index.operators[position], index.trace.shapes
    if softmax.kind != "softmax":
        return None
    steps, causal, biases = [position], False, list[str]()
    name = index.skip_casts(softmax.inputs[0])
    while (maker := index.maker.get(name)) is not None and index.operators[maker].kind != "matmul":
        one = index.operators[maker]
        if not OPERATORS[one.kind].chained or not one.outputs:
            return None
        steps.append(maker)
        arithmetic = ("matmul", "scale", "multiply", "add", "select")
        scores = [
            source
            for source in one.inputs
            if source and shapes[source] == shapes[name] and index.find_maker(source, *arithmetic) is not None
        ]
        masks = [source for source in one.inputs if source and source not in scores]
        biases += [mask for mask in masks if mask in index.learned]
        causal = causal or any(_is_square_mask(shapes[mask], shapes[name]) for mask in masks if mask not in biases)
        if len(scores) != 1:
            return None
        name = scores[0]
    if maker is None:
        return None
    product = maker
    steps.append(product)
    output, dropout = softmax.outputs[0], 0.0
    if (dropped := index.find_only_reader(output, "dropout")) is not None:
        steps.append(dropped)
        output, dropout = index.operators[dropped].outputs[0], 1.0
    last = index.find_only_reader(output, "matmul")
    value = index.find_other_input(last, output) if last is not None else None
    if last is None or value is None or len(shapes[index.operators[last].outputs[0]]) < 3:
        return None
    steps.append(last)
    query, key = index.operators[product].inputs[:2]
    output = index.operators[last].outputs[0]
    if len(shapes[query]) < 3 or len(shapes[key]) < 3 or not index.has_no_other_reader(set(steps), output):
        return None
    heads = shapes[query][-3]
    attributes = {
        "batch": prod(shapes[query][:-3]), "heads": heads, "kv_heads": heads, "seq_q": shapes[query][-2],
        "seq_kv": shapes[key][-1], "head_dim": shapes[query][-1], "causal": float(causal), "dropout": dropout,
    }  # fmt: skip
    return LayerMatch(frozenset(steps), TraceOperator("attention", (query, key, value, *biases), (output,), attributes))


def _is_square_mask(mask: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """Return whether a mask has a value for each pair of positions, as a causal mask has."""
    return len(mask) >= 2 and mask[-2:] == scores[-2:] and mask[-2] == mask[-1] > 1


PASSES: tuple[Callable[[TraceIndex, int], LayerMatch | None], ...] = (
    _match_bias,
    _match_norm,
    _match_activation,
    _match_attention,
)
"""Passes in the order in which they run."""


def normalize(trace: Trace) -> Trace:
    """Return the trace with split layers joined, and without operators, parameters and tensors that nothing reads."""
    for match in PASSES:
        trace = _replace_matches(trace, match)
    outputs = set(trace.outputs)
    operators: list[TraceOperator] = []
    for one in reversed(trace.operators):
        if outputs.intersection(one.outputs):
            outputs.update(one.inputs)
            operators.append(one)
    names = {*outputs, *trace.inputs, *(name for one in operators for name in one.outputs)} - {""}
    return replace(
        trace,
        operators=tuple(reversed(operators)),
        parameters=tuple(name for name in trace.parameters if name in outputs),
        shapes={name: trace.shapes[name] for name in trace.shapes if name in names},
    )


def _replace_matches(trace: Trace, find_match: Callable[[TraceIndex, int], LayerMatch | None]) -> Trace:
    index, claimed = TraceIndex(trace), set[int]()
    put: dict[int, TraceOperator] = {}
    for at in range(len(trace.operators)):
        match = find_match(index, at)
        if match is not None and not claimed & match.replaced:
            claimed |= match.replaced
            put[max(match.replaced)] = match.operator
    operators = (put.get(at, one) for at, one in enumerate(trace.operators) if at in put or at not in claimed)
    return replace(trace, operators=tuple(operators))
