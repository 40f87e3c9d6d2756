"""What a run of the tests must not skip.

`TILECAST_REQUIRE=kind,image,chromium` makes a failure of each test that needs one of these and does not find it.
"""

from __future__ import annotations

import os

VARIABLE = "TILECAST_REQUIRE"
FEATURES = ("chromium", "image", "kind")


def is_required(feature: str) -> bool:
    """Return whether the environment names the feature.

    Raises:
        ValueError: it names one that there is not.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    if unknown := sorted(set(names) - set(FEATURES)):
        raise ValueError(f"{VARIABLE} names {', '.join(unknown)}: use some of {', '.join(FEATURES)}")
    return feature in names
