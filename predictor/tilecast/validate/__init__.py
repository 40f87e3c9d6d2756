"""Compare forecasts with the user's own measured training runs, from CSV tables.

`reading` turns a row into a workload and a pool, `runs` forecasts rows, and `scores` computes errors. `calibration` and
`transfer` measure how much runs improve forecasts of other runs. The package `tilecast-lab` reads published tables.
"""

from __future__ import annotations

from tilecast.inputs.tracking import Track, iterate_without_progress

__all__ = ["Track", "iterate_without_progress"]
