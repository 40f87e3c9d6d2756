"""Models: the dimensions of an architecture.

`Model` has the dimensions that every family has. `Model.dimensions` has the dimensions that only one family has, in a
frozen dataclass. The dataclass is in the module of `tilecast.zoo` that builds the family's graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeAlias, TypeVar

from tilecast.trace import Trace

DimensionsT = TypeVar("DimensionsT", bound="Dimensions")

Problem: TypeAlias = tuple[str, str, str]
"""Name of a dimension that contradicts others, the problem, and the remedy."""


def numbered_field(name: str, default: Any = MISSING) -> Any:
    """Return a dataclass field for a tuple. In documents, its items have the keys `name`1, `name`2 and so on."""
    return field(default=default, metadata={"numbered": name})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Dimensions:
    """Dimensions of a model that only its family has.

    They are counts unless their docstring says otherwise. A dimension without a default must be stated and positive.
    """

    stated: tuple[str, ...] = ()
    """Names of the stated dimensions, in the order in which they were stated.

    Digests cover only these, so that a new dimension with a default changes no digest.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._field_values() == other._field_values()

    def __hash__(self) -> int:
        return hash(self._field_values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._field_values()!r}"

    # One comparison serves all families: a generated one for each would take longer to import than a forecast takes.
    def _field_values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    @property
    def caps_scores(self) -> bool:
        """Whether a function caps attention scores, which PyTorch's fused attention does not support."""
        return False

    def problems(self, model: Model) -> Iterator[Problem]:
        """Yield a problem for each dimension that contradicts other dimensions of the model."""
        yield from ()

    def unmeasured(self, *counted: str) -> Iterator[Problem]:
        """Yield a problem for each of the names `counted` whose tokens have no width.

        Tokens have no width if `NAME_tokens` is positive, but `NAME_width` is not.
        """
        for name in counted:
            count = getattr(self, f"{name}_tokens")
            if count > 0 and not getattr(self, f"{name}_width") > 0:
                yield f"{name}_width", f"must be positive beside {name}_tokens {count}", "state it"

    def document(self) -> dict[str, float]:
        """Return the stated dimensions as numbers by name, for documents and digests."""
        numbers: dict[str, float] = {}
        for name in self.stated:
            value, prefix = getattr(self, name), self.__dataclass_fields__[name].metadata.get("numbered")
            items = {f"{prefix}{place}": item for place, item in enumerate(value, 1)} if prefix else {name: value}
            numbers |= {key: float(item) for key, item in items.items()}
        return numbers


@dataclass(frozen=True, slots=True)
class Projector:
    """Two dense layers that turn a tower's tokens into tokens of the model."""

    inner: float
    """Number of outputs of the first layer."""
    inputs: float
    """Width of the tower's tokens."""
    tokens: float
    """Tokens per sample that it reads."""
    outputs: float | None = None
    """Number of outputs of the second layer. None if there is only the first layer."""
    count: float | None = None
    """Number of projectors, which read different layers of the tower (DeepStack, arXiv 2406.04334). None means one."""

    def document(self) -> dict[str, float]:
        """Return the stated dimensions by name, for digests."""
        sizes = {"projector": self.inner, "projector_inputs": self.inputs, "projector_tokens": self.tokens,
                 "projector_outputs": self.outputs, "projectors": self.count}  # fmt: skip
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True, slots=True)
class Model:
    """Dimensions of an architecture. `family` is a key of `tilecast.zoo.FAMILIES`."""

    name: str
    family: str
    layers: int = 0
    hidden: int = 0
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 0
    ffn_hidden: int = 0
    vocab: int = 0
    positions: int = 0
    """Number of learned position embeddings. 0 if positions are rotary, relative or ALiBi."""
    gated_mlp: bool = False
    rms_norm: bool = False
    rotary: bool = False
    causal: bool = True
    bias: bool = True
    tied_embeddings: bool = True
    dropout: bool = False
    dimensions: Dimensions = Dimensions()
    """Dimensions that only its family has."""
    trace: Trace | None = None
    """Operators of a model of family "traced", which has no dimensions of its own."""
    towers: tuple[Model, ...] = ()
    """Encoders of images or sound, trained with the model, whose output it reads."""
    projector: Projector | None = None
    """Layers between a tower and the model that reads it."""
    notes: tuple[str, ...] = ()
    """Sentences about assumptions on the model, and about parts that are not priced."""
    auto: str | None = None
    """Part after `AutoModel` in the name of the Transformers class that returns the loss.

    Empty if there is no such class. None for the usual class of the family.
    """

    def get_dimensions(self, kind: type[DimensionsT]) -> DimensionsT:
        """Return the dimensions that only the model's family has, which must be of the given class.

        Raises:
            TypeError: they are of another class.
        """
        if not isinstance(self.dimensions, kind):
            raise TypeError(f"{self.name} is of family {self.family}, which has no {kind.__name__}")
        return self.dimensions

    def with_dimensions(self, **changes: Any) -> Model:
        """Return the model with some of its family's dimensions changed. Changed dimensions count as stated."""
        stated = tuple(dict.fromkeys((*self.dimensions.stated, *changes)))
        return replace(self, dimensions=replace(self.dimensions, **changes, stated=stated))

    def document(self) -> dict[str, Any]:
        """Return the model as a dictionary for documents and digests, with the dimensions of its family as `extra`."""
        general: dict[str, Any] = {}
        for item in fields(self):
            if item.name == "dimensions":
                projector = {} if self.projector is None else self.projector.document()
                general["extra"] = {**self.dimensions.document(), **projector}
            elif item.name == "towers":
                general |= {"pattern": getattr(self.dimensions, "pattern", ()), "towers": self.towers}
            elif item.name != "projector":
                general[item.name] = getattr(self, item.name)
        return general
