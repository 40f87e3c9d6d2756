"""Features that a test run must not skip.

`TILECAST_REQUIRE=kind,image,chromium,launchers` makes each test that needs one of these and does not find it fail.
"""

from __future__ import annotations

import os

VARIABLE = "TILECAST_REQUIRE"
FEATURES = ("chromium", "image", "kind", "launchers")


def is_required(feature: str) -> bool:
    """Return whether the environment names the feature.

    Raises:
        ValueError: the environment names an unknown feature.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    if unknown := sorted(set(names) - set(FEATURES)):
        raise ValueError(f"{VARIABLE} names {', '.join(unknown)}: use some of {', '.join(FEATURES)}")
    return feature in names
