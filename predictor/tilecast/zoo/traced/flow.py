"""Data flow through a trace.

`flow_of` finds which tensors depend on the samples, where gradients flow, which tensors stay alive until the backward
pass, and where the model can be cut into stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

from tilecast.trace import Trace, TraceOperator
from tilecast.zoo.traced.operators import OPERATORS, Operand, Site, attribute_key


@dataclass(frozen=True, slots=True)
class Unit:
    """Operators that are priced together: one operator, or a chain of element-wise ones that a norm may lead.

    Each operator of a chain is the only reader of the one before it. `outside` are the full-size tensors that the chain
    reads from elsewhere, without those that the leading norm reads.
    """

    sites: tuple[Site, ...]
    outside: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Activations:
    """Elements that stay alive until the backward pass, at the traced batch.

    `batched` counts elements of tensors that grow with the batch, `fixed` those of other tensors. `scores`,
    `dropped_scores` (scores with dropout) and `statistics` are attention's. `bytes` counts the bytes of masks.
    """

    batched: float
    fixed: float
    scores: float
    dropped_scores: float
    statistics: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Operators between two places where the model can be cut.

    `units` has each unit with its number of occurrences. `parameters` counts those that are read here first,
    `activations` the elements that grow with the batch and stay alive, and `boundary` the elements that flow out.
    """

    units: Mapping[Unit, int]
    parameters: float
    activations: float
    boundary: float


@dataclass(frozen=True, slots=True)
class Flow:
    """Units of a trace, each with its number of occurrences, and its parameters, activations and segments."""

    units: Mapping[Unit, int]
    parameters: float
    activations: Activations
    segments: tuple[Segment, ...]
    output: Operand | None
    """First output of the model, or None if that has fewer than two dimensions, as a loss has."""


@lru_cache(maxsize=64)
def flow_of(trace: Trace) -> Flow:
    """Return the flow of a trace."""
    return _FlowReader(trace).read()


class _FlowReader:
    """Reader that walks a trace once, in order."""

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

    def read(self) -> Flow:
        trace = self.trace
        for operator in trace.operators:
            self._enter(operator)
        groups = self._groups()
        units = [self._unit(group) for group in groups]
        forks = [self._forks(group[-1]) for group in groups]
        tensors = [self._live(group) for group in groups]
        segments = self._segments(groups, units, forks, tensors)
        counted: Counter[Unit] = Counter()
        for segment in segments:
            counted.update(segment.units)
        output = trace.outputs[0] if trace.outputs else ""
        is_answer = len(trace.shapes.get(output, ())) >= 2
        return Flow(
            units=counted,
            parameters=sum(segment.parameters for segment in segments),
            activations=self._total(tensors),
            segments=segments,
            output=self._operand(output) if is_answer else None,
        )

    def _enter(self, operator: TraceOperator) -> None:
        """Record what an operator's outputs inherit from its inputs."""
        rule = OPERATORS[operator.kind]
        inputs = [name for name in operator.inputs if name]
        is_batched = operator.kind != "constant" and any(name in self.batched for name in inputs)
        is_trained = rule.gradient and any(name in self.trained for name in inputs)
        order = self._order(operator)
        is_wide = rule.answers == "FP32" or ("groups" in operator.attributes and operator.kind == "channelnorm")
        is_wide = is_wide or (rule.answers == "promoted" and self._promotes(operator))
        for name in operator.outputs:
            if is_wide:
                self.wide.add(name)
            self.order[name] = order
            if is_batched:
                self.batched.add(name)
            if is_trained:
                self.trained.add(name)
            is_copy = operator.kind == "reshape" and self._strided(inputs[0])
            if not rule.moves and not is_copy:
                self.root[name] = self.root.get(inputs[0], inputs[0])

    def _promotes(self, operator: TraceOperator) -> bool:
        """Return whether an operator's inputs promote its output to FP32.

        Channel norms have FP32 weights but keep the type of their input. A single number promotes nothing.
        """
        if operator.kind == "cast":
            return False
        sources = operator.inputs[:1] if operator.kind == "channelnorm" else operator.inputs
        return any(name in self.wide and prod(self.trace.shapes[name]) > 1 for name in sources if name)

    def _order(self, operator: TraceOperator) -> tuple[int, ...] | None:
        """Return the order of the output's dimensions in memory, or None if that is not known."""
        source = next((name for name in operator.inputs if name), "")
        rank = len(self.trace.shapes.get(source, ()))
        before = self.order.get(source, tuple(range(rank)))
        made = len(self.trace.shapes[operator.outputs[0]])
        if operator.kind == "transpose":
            steps = [int(operator.attributes[f"axis{axis}"]) for axis in range(rank)]
            return tuple(before[step] for step in steps) if before is not None else None
        if operator.kind in ("view", "part"):
            return before if made == rank else tuple(range(made)) if not self._strided(source) else None
        if operator.kind == "attention" and made == 4:
            # Fused kernels write their output as the next layer reads it: a token's heads side by side.
            return (0, 2, 1, 3)
        return tuple(range(made))

    def _strided(self, name: str) -> bool:
        order = self.order.get(name, ())
        return order is None or order != tuple(range(len(order)))

    def _operand(self, name: str) -> Operand:
        return Operand(
            self.trace.shapes[name], name in self.batched, name in self.trained, self._strided(name), name in self.wide
        )

    def _groups(self) -> list[list[TraceOperator]]:
        """Return the operators that depend on samples or parameters, with chains of element-wise ones grouped."""
        groups: list[list[TraceOperator]] = []
        for operator in self.trace.operators:
            if not any(name in self.batched or name in self.trained for name in operator.outputs):
                continue
            last = groups[-1][-1] if groups else None
            if last is not None and self._follows(last, operator):
                groups[-1].append(operator)
            else:
                groups.append([operator])
        return groups

    def _follows(self, last: TraceOperator, operator: TraceOperator) -> bool:
        """Return whether a compiler runs an operator in the same pass as the one before it."""
        before = OPERATORS[last.kind]
        if not ((before.chained or before.leads) and OPERATORS[operator.kind].chained):
            return False
        made = last.outputs[0]
        return len(last.outputs) == len(operator.outputs) == 1 and made in operator.inputs and self.uses[made] == 1

    def _unit(self, group: list[TraceOperator]) -> Unit:
        inner = {operator.outputs[0] for operator in group[:-1]}
        chain = group[OPERATORS[group[0].kind].leads :]
        names = dict.fromkeys(name for operator in chain for name in operator.inputs if name and name not in inner)
        size = prod(self.trace.shapes[group[-1].outputs[0]])
        outside = tuple(self._operand(name) for name in names if prod(self.trace.shapes[name]) == size)
        return Unit(tuple(self._site(operator) for operator in group), outside if len(group) > 1 else ())

    def _site(self, operator: TraceOperator) -> Site:
        inputs = tuple(self._operand(name) for name in operator.inputs if name)
        largest = max(operator.outputs, key=lambda name: prod(self.trace.shapes[name]))
        output = self._operand(largest)
        attributes = attribute_key(operator)
        if operator.kind == "transpose":
            attributes = ()
        return Site(operator.kind, attributes, inputs, output)

    def _forks(self, operator: TraceOperator) -> list[Unit]:
        """Return the sums of gradients for outputs of an operator that are read more than once."""
        units = []
        for name in operator.outputs:
            again = self.uses[name] - 1
            if name in self.trained and name in self.batched and again > 0 and operator.kind != "constant":
                operand = self._operand(name)
                units += [Unit((Site("fork", (), (operand,), operand),), ())] * again
        return units

    def _live(self, group: list[TraceOperator]) -> list[tuple[str, str]]:
        """Return what a group keeps, as (what, tensor).

        `what` is "tensor", "mask", "statistics", "scores" or "dropped-scores".
        """
        tensors: list[tuple[str, str]] = []
        for operator in group:
            rule, output = OPERATORS[operator.kind], operator.outputs[0]
            if output not in self.trained:
                continue
            inputs = [name for name in operator.inputs if name]
            if rule.keeps == "mask":
                tensors.append(("mask", output))
            elif rule.keeps == "inputs":
                # Each factor of a product is needed if the other one has a gradient.
                pair = inputs[:2]
                tensors += [
                    ("tensor", one) for one, other in zip(pair, pair[::-1], strict=True) if other in self.trained
                ]
            elif rule.keeps == "attention":
                tensors += [("tensor", name) for name in (*inputs[:3], output)]
                dropped = operator.attributes.get("dropout", 0.0) > 0
                tensors += [("statistics", output), ("dropped-scores" if dropped else "scores", output)]
            elif rule.keeps != "nothing":
                tensors.append(("tensor", inputs[0] if rule.keeps == "input" else output))
        parameters = set(self.trace.parameters)
        return [(what, self.root.get(name, name)) if what == "tensor" else (what, name) for what, name in tensors
                if self.root.get(name, name) not in parameters]  # fmt: skip

    def _sizes(self, items: Iterable[tuple[str, str]]) -> Activations:
        totals: dict[str, float] = defaultdict(float)
        for what, name in items:
            shape = self.trace.shapes[name]
            if what == "tensor":
                totals["batched" if name in self.batched else "fixed"] += prod(shape)
            elif what == "mask":
                totals["mask"] += prod(shape)
            else:
                sizes = self.made[name].attributes
                rows = sizes["batch"] * sizes["heads"] * sizes["seq_q"]
                totals[what] += rows if what == "statistics" else rows * sizes["seq_kv"]
        return Activations(
            totals["batched"], totals["fixed"], totals["scores"], totals["dropped-scores"], totals["statistics"],
            totals["mask"],
        )  # fmt: skip

    def _total(self, tensors: list[list[tuple[str, str]]]) -> Activations:
        return self._sizes(dict.fromkeys(item for items in tensors for item in items))

    def _segments(
        self,
        groups: list[list[TraceOperator]],
        units: list[Unit],
        forks: list[list[Unit]],
        tensors: list[list[tuple[str, str]]],
    ) -> tuple[Segment, ...]:
        """Split the trace into segments at the places where a single trained tensor is alive."""
        ends = self._cuts(groups)
        sizes_at = {index + 1: size for index, size in ends}
        seen: set[str] = set()
        held: set[tuple[str, str]] = set()
        segments = []
        parameters = set(self.trace.parameters)
        for start, end in pairwise([0, *(index + 1 for index, _ in ends)]):
            part = range(start, end)
            names = {name for index in part for operator in groups[index] for name in operator.inputs}
            fresh = (names & parameters) - seen
            seen |= fresh
            items = dict.fromkeys(item for index in part for item in tensors[index] if item not in held)
            held |= set(items)
            sizes = self._sizes(items)
            counted = Counter(unit for index in part for unit in (units[index], *forks[index]))
            boundary = sizes_at[end]
            segments.append(
                Segment(
                    counted, float(sum(prod(self.trace.shapes[name]) for name in fresh)), sizes.batched, float(boundary)
                )
            )
        return tuple(segments)

    def _cuts(self, groups: list[list[TraceOperator]]) -> list[tuple[int, int]]:
        """Return (index of a group, elements alive after it) for every place to cut, and last for the model's end."""
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
