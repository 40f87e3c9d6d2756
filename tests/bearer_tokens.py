"""Tokens in the form of service account tokens, with signatures that nobody checks."""

from __future__ import annotations

import base64
import json
from typing import Any

NOW_S = 1_700_000_000.0


def token(namespace: str = "team", signature: str = "signed", **claims: Any) -> str:
    """Return a token with these claims, valid at `NOW_S` unless the claims say another time.

    `signature` may be any text.
    """
    payload = {
        "aud": ["tilecast"],
        "exp": NOW_S + 600,
        "sub": f"system:serviceaccount:{namespace}:trainer",
        **claims,
    }
    parts = [json.dumps(part).encode() for part in ({"alg": "RS256"}, payload)]
    return ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), signature])
