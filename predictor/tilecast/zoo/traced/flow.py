"""Data flow through a trace.

`trace_flow` finds the tensors that depend on the samples, the tensors that need a gradient, the tensors that are saved
for the backward pass ("kept"), and the points where the model can be cut into pipeline stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TypeAlias

from tilecast.trace import Trace, TraceOperator
from tilecast.zoo.traced.operators import OPERATORS, CalledOperator, Operand


@dataclass(frozen=True, slots=True)
class OperatorGroup:
    """A single operator, or a chain of element-wise operators that is priced as one kernel.

    A chain may begin with a norm. Each operator of a chain is the only reader of the previous output. `outside` has the
    full-size tensors that the chain reads besides its own outputs and the inputs of its norm.
    """

    calls: tuple[CalledOperator, ...]
    outside: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Activations:
    """Number of elements that are saved for the backward pass, at the traced batch size.

    `batched` counts elements of tensors that grow with the batch, and `fixed` counts elements of all other tensors.
    `scores`, `dropped_scores` (scores with dropout) and `statistics` are saved by attention. `bytes` counts bytes of
    masks.
    """

    batched: float = 0.0
    fixed: float = 0.0
    scores: float = 0.0
    dropped_scores: float = 0.0
    statistics: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """Operators between two points where the model can be cut.

    `units` maps each unit to its number of occurrences. `parameters` counts the parameters that no earlier segment
    reads. `activations` counts the saved elements that grow with the batch, and `boundary` counts the elements that
    flow into the next segment.
    """

    units: Mapping[OperatorGroup, int]
    parameters: float
    activations: float
    boundary: float


@dataclass(frozen=True, slots=True)
class DataFlow:
    """The units of a trace, each with its number of occurrences, and its parameters, activations and segments."""

    units: Mapping[OperatorGroup, int]
    parameters: float
    activations: Activations
    segments: tuple[Segment, ...]
    output: Operand | None
    """First output of the model. None if it has fewer than two dimensions, like a loss."""


Kept: TypeAlias = tuple[str, str]
"""A tensor kept until the backward pass: the field of `Activations` that counts it, or "tensor", and its name."""


@lru_cache(maxsize=64)
def trace_flow(trace: Trace) -> DataFlow:
    """Return the units, activations and segments of a trace."""
    return _DataFlowReader(trace).read()


class _DataFlowReader:
    """Reader of a trace that finds the data flow of a model from its operators."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.batched = {name for name in trace.inputs if trace.shapes[name][:1] == (trace.batch,)}
        self.trained = set(trace.parameters)
        self.wide = {*trace.parameters, *trace.inputs}
        self.order: dict[str, tuple[int, ...] | None] = {}
        self.root: dict[str, str] = {}
        self.made = {name: operator for operator in trace.operators for name in operator.outputs}
        self.uses = Counter(name for operator in trace.operators for name in operator.inputs)
        self.uses.update(trace.outputs)

    def read(self) -> DataFlow:
        trace = self.trace
        for operator in trace.operators:
            self._record_operator(operator)
        groups = self._group_operators()
        kept = [self._list_kept_tensors(group) for group in groups]
        segments = self._split_segments(groups, kept)
        counted: Counter[OperatorGroup] = Counter()
        for segment in segments:
            counted.update(segment.units)
        output = trace.outputs[0] if trace.outputs else ""
        is_answer = len(trace.shapes.get(output, ())) >= 2
        return DataFlow(
            units=counted,
            parameters=sum(segment.parameters for segment in segments),
            activations=self._sum_kept_tensors(dict.fromkeys(item for items in kept for item in items)),
            segments=segments,
            output=self._describe_tensor(output) if is_answer else None,
        )

    def _record_operator(self, operator: TraceOperator) -> None:
        """Record the properties that the outputs of an operator inherit from its inputs."""
        rule = OPERATORS[operator.kind]
        inputs = [name for name in operator.inputs if name]
        is_batched = operator.kind != "constant" and any(name in self.batched for name in inputs)
        is_trained = rule.gradient and any(name in self.trained for name in inputs)
        order = self._find_output_order(operator)
        precision = rule.output_precision
        is_wide = precision == "FP32" or ("groups" in operator.attributes and operator.kind == "channelnorm")
        is_wide = is_wide or (precision == "promoted" and self._promotes_output(operator))
        for name in operator.outputs:
            if is_wide:
                self.wide.add(name)
            self.order[name] = order
            if is_batched:
                self.batched.add(name)
            if is_trained:
                self.trained.add(name)
            is_copy = operator.kind == "reshape" and self._is_strided(inputs[0])
            if not rule.moves and not is_copy:
                self.root[name] = self.root.get(inputs[0], inputs[0])

    def _promotes_output(self, operator: TraceOperator) -> bool:
        """Return whether the inputs of an operator promote its output to FP32.

        Channel norms have FP32 weights but keep the type of their input. A single number promotes nothing.
        """
        if operator.kind == "cast":
            return False
        sources = operator.inputs[:1] if operator.kind == "channelnorm" else operator.inputs
        return any(name in self.wide and prod(self.trace.shapes[name]) > 1 for name in sources if name)

    def _find_output_order(self, operator: TraceOperator) -> tuple[int, ...] | None:
        """Return the order of the output's dimensions in memory, or None if it is unknown."""
        source = next((name for name in operator.inputs if name), "")
        rank = len(self.trace.shapes.get(source, ()))
        before = self.order.get(source, tuple(range(rank)))
        made = len(self.trace.shapes[operator.outputs[0]])
        if operator.kind == "transpose":
            steps = [int(operator.attributes[f"axis{axis}"]) for axis in range(rank)]
            return tuple(before[step] for step in steps) if before is not None else None
        if operator.kind in ("view", "part"):
            return before if made == rank else tuple(range(made)) if not self._is_strided(source) else None
        if operator.kind == "attention" and made == 4:
            # Fused kernels write their output as the next layer reads it: a token's heads side by side.
            return (0, 2, 1, 3)
        return tuple(range(made))

    def _is_strided(self, name: str) -> bool:
        order = self.order.get(name, ())
        return order is None or order != tuple(range(len(order)))

    def _describe_tensor(self, name: str) -> Operand:
        is_wide, is_strided = name in self.wide, self._is_strided(name)
        return Operand(self.trace.shapes[name], name in self.batched, name in self.trained, is_strided, is_wide)

    def _group_operators(self) -> list[list[TraceOperator]]:
        """Return the operators that depend on samples or parameters, in groups.

        A chain of element-wise operators is one group. Every other operator is a group of its own.
        """
        groups: list[list[TraceOperator]] = []
        for operator in self.trace.operators:
            if not any(name in self.batched or name in self.trained for name in operator.outputs):
                continue
            last = groups[-1][-1] if groups else None
            if last is not None and self._is_fused(last, operator):
                groups[-1].append(operator)
            else:
                groups.append([operator])
        return groups

    def _is_fused(self, last: TraceOperator, operator: TraceOperator) -> bool:
        """Return whether a compiler would run an operator and the one before it as one kernel."""
        before = OPERATORS[last.kind]
        if not ((before.chained or before.leads) and OPERATORS[operator.kind].chained):
            return False
        made = last.outputs[0]
        return len(last.outputs) == len(operator.outputs) == 1 and made in operator.inputs and self.uses[made] == 1

    def _build_unit(self, group: list[TraceOperator]) -> OperatorGroup:
        inner = {operator.outputs[0] for operator in group[:-1]}
        chain = group[OPERATORS[group[0].kind].leads :]
        names = dict.fromkeys(name for operator in chain for name in operator.inputs if name and name not in inner)
        size = prod(self.trace.shapes[group[-1].outputs[0]])
        outside = tuple(self._describe_tensor(name) for name in names if prod(self.trace.shapes[name]) == size)
        return OperatorGroup(
            tuple(self._describe_call(operator) for operator in group), outside if len(group) > 1 else ()
        )

    def _describe_call(self, operator: TraceOperator) -> CalledOperator:
        inputs = tuple(self._describe_tensor(name) for name in operator.inputs if name)
        largest = max(operator.outputs, key=lambda name: prod(self.trace.shapes[name]))
        output = self._describe_tensor(largest)
        attributes = () if operator.kind == "transpose" else tuple(sorted(operator.attributes.items()))
        return CalledOperator(operator.kind, attributes, inputs, output)

    def _sum_gradients(self, operator: TraceOperator) -> list[OperatorGroup]:
        """Return units that each add two gradients, one unit for every read of an operator's output after the first."""
        units = []
        for name in operator.outputs:
            again = self.uses[name] - 1
            if name in self.trained and name in self.batched and again > 0 and operator.kind != "constant":
                operand = self._describe_tensor(name)
                units += [OperatorGroup((CalledOperator("fork", (), (operand,), operand),), ())] * again
        return units

    def _list_kept_tensors(self, group: list[TraceOperator]) -> list[Kept]:
        """Return the tensors that a group of operators saves for the backward pass."""
        tensors: list[Kept] = []
        for operator in group:
            rule, output = OPERATORS[operator.kind], operator.outputs[0]
            if output not in self.trained:
                continue
            inputs = [name for name in operator.inputs if name]
            if rule.keeps == "mask":
                tensors.append(("bytes", output))
            elif rule.keeps == "inputs":
                # Each factor of a product is needed if the other one has a gradient.
                pair = inputs[:2]
                tensors += [
                    ("tensor", one) for one, other in zip(pair, pair[::-1], strict=True) if other in self.trained
                ]
            elif rule.keeps == "attention":
                tensors += [("tensor", name) for name in (*inputs[:3], output)]
                dropped = operator.attributes.get("dropout", 0.0) > 0
                tensors += [("statistics", output), ("dropped_scores" if dropped else "scores", output)]
            elif rule.keeps != "nothing":
                tensors.append(("tensor", inputs[0] if rule.keeps == "input" else output))
        parameters = set(self.trace.parameters)
        return [(what, self.root.get(name, name)) if what == "tensor" else (what, name) for what, name in tensors
                if self.root.get(name, name) not in parameters]  # fmt: skip

    def _sum_kept_tensors(self, items: Iterable[Kept]) -> Activations:
        totals: dict[str, float] = defaultdict(float)
        for what, name in items:
            shape = self.trace.shapes[name]
            if what == "tensor":
                totals["batched" if name in self.batched else "fixed"] += prod(shape)
            elif what == "bytes":
                totals["bytes"] += prod(shape)
            else:
                sizes = self.made[name].attributes
                rows = sizes["batch"] * sizes["heads"] * sizes["seq_q"]
                totals[what] += rows if what == "statistics" else rows * sizes["seq_kv"]
        return Activations(**totals)

    def _split_segments(self, groups: list[list[TraceOperator]], kept: list[list[Kept]]) -> tuple[Segment, ...]:
        """Return the segments between the points where the model can be cut.

        Such a point is where only one tensor with a gradient is still needed.
        """
        ends = self._find_cuts(groups)
        sizes_at = {index + 1: size for index, size in ends}
        unread, held = set(self.trace.parameters), set[Kept]()
        segments = []
        for start, end in pairwise([0, *(index + 1 for index, _ in ends)]):
            part = groups[start:end]
            fresh = {name for group in part for operator in group for name in operator.inputs} & unread
            unread -= fresh
            parameters = float(sum(prod(self.trace.shapes[name]) for name in fresh))
            items = dict.fromkeys(item for tensors in kept[start:end] for item in tensors if item not in held)
            held |= set(items)
            counted = Counter(
                unit for group in part for unit in (self._build_unit(group), *self._sum_gradients(group[-1]))
            )
            segments.append(Segment(counted, parameters, self._sum_kept_tensors(items).batched, float(sizes_at[end])))
        return tuple(segments)

    def _find_cuts(self, groups: list[list[TraceOperator]]) -> list[tuple[int, int]]:
        """Return the points where the model can be cut into stages.

        Each point is a pair: the index of the last group before the cut, and the number of elements that cross the
        cut. The last pair is the end of the model.
        """
        last_use: dict[str, int] = {}
        for index, group in enumerate(groups):
            for operator in group:
                for name in operator.inputs:
                    last_use[self.root.get(name, name)] = index
        for name in self.trace.outputs:
            last_use[self.root.get(name, name)] = len(groups)
        alive: dict[str, int] = {}
        cuts: list[tuple[int, int]] = []
        for index, group in enumerate(groups):
            for operator in group:
                for name in operator.outputs:
                    root = self.root.get(name, name)
                    if name in self.trained and name in self.batched and last_use.get(root, -1) > index:
                        alive[root] = prod(self.trace.shapes[root])
            alive = {name: size for name, size in alive.items() if last_use[name] > index}
            if len(alive) == 1 and index < len(groups) - 1:
                cuts.append((index, next(iter(alive.values()))))
        return [*cuts, (len(groups) - 1, 0)]
