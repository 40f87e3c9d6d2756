"""Model of a measured step's parts in seconds. Reports, statuses and files of measured steps extend it."""

from __future__ import annotations

from tilecast.api.base import ApiModel, optional_field, round_to_six_digits
from tilecast.learning.job_calibration import MeasuredParts


class PartSeconds(ApiModel):
    """Parts of a step in seconds, which do not overlap. Unknown parts are absent."""

    input_seconds: float | None = optional_field("Seconds of a step that the GPU waited for data.", ge=0, le=1e9)
    forward_seconds: float | None = optional_field("Seconds of its forward passes.", ge=0, le=1e9)
    backward_seconds: float | None = optional_field("Seconds of its backward passes.", ge=0, le=1e9)
    optimizer_seconds: float | None = optional_field("Seconds of its weight update.", ge=0, le=1e9)
    communication_seconds: float | None = optional_field("Seconds of collectives that nothing hid.", ge=0, le=1e9)

    @property
    def parts(self) -> MeasuredParts:
        """Seconds of the parts of the step, as `MeasuredParts`."""
        passes = (self.forward_seconds, self.backward_seconds)
        return MeasuredParts(self.input_seconds, *passes, self.optimizer_seconds, self.communication_seconds)


def to_part_fields(parts: MeasuredParts) -> dict[str, float]:
    """Return the seconds of the known parts of a step, by field name of `PartSeconds`, rounded to six digits."""
    known = zip(PartSeconds.model_fields, parts.values, strict=True)
    return {name: round_to_six_digits(value) for name, value in known if value is not None}
