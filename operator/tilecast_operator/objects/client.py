"""Client of the API server, with the operator's name and bounds."""

from __future__ import annotations

import json
from typing import Any

from tilecast import untrusted
from tilecast_operator.kube.client import Api
from tilecast_operator.objects.documents import FIELD_MANAGER


def client(timeout_s: float) -> Api:
    """Return a client; `timeout_s` is the limit of one request, in seconds."""
    return Api(timeout_s, FIELD_MANAGER, parse)


def parse(text: str) -> dict[str, Any]:
    """Parse an answer of the API server; cut away what is nested deeper than anything that is read."""
    answer: dict[str, Any] = json.loads(text)
    return untrusted.cut(answer) if untrusted.is_deeper(text, untrusted.MAX_DEPTH) else answer
