"""Label selectors of Kubernetes, which select the namespaces that an operator handles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from tilecast import untrusted
from tilecast.api.base import ApiModel, validate_model
from tilecast.spec import SpecError


class Requirement(ApiModel):
    """One requirement among the `matchExpressions` of a label selector."""

    key: str = Field(min_length=1)
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = Field(default_factory=list)

    def is_met_by(self, labels: Mapping[str, str]) -> bool:
        """Return whether these labels meet the requirement."""
        if self.operator in ("In", "NotIn"):
            return (labels.get(self.key) in self.values) == (self.operator == "In")
        return (self.key in labels) == (self.operator == "Exists")


class LabelSelector(ApiModel):
    """A LabelSelector of Kubernetes. An empty one selects everything."""

    match_labels: dict[str, str] = Field(default_factory=dict)
    match_expressions: list[Requirement] = Field(default_factory=list)

    @classmethod
    def from_json(cls, text: str, field: str) -> LabelSelector | None:
        """Return the selector in a JSON text, or None if it selects everything or the text is empty.

        Args:
            text: the JSON.
            field: name of the setting that contains the text.

        Raises:
            SpecError: the text is not a selector.
        """
        remedy = 'write {"matchLabels": {"shard": "a"}}'
        try:
            document = untrusted.parse_json(text or "{}")
        except ValueError:
            raise SpecError(field, f"{text[:40]!r} is no JSON", remedy) from None
        if not isinstance(document, dict):
            raise SpecError(field, f"{text[:40]!r} is no LabelSelector", remedy)
        selector = validate_model(cls, document, field)
        return selector if selector.match_labels or selector.match_expressions else None

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Return whether the selector matches these labels."""
        has_labels = all(labels.get(key) == value for key, value in self.match_labels.items())
        return has_labels and all(item.is_met_by(labels) for item in self.match_expressions)
