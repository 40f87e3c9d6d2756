"""Client of the API server with the operator's field manager and limits on responses."""

from __future__ import annotations

import json
from typing import Any

from tilecast import untrusted
from tilecast_operator.kube.client import Api
from tilecast_operator.objects.documents import FIELD_MANAGER


def client(timeout_s: float) -> Api:
    """Return a client of the API server. Its requests take at most `timeout_s` seconds."""
    return Api(timeout_s, FIELD_MANAGER, parse)


def parse(text: str) -> dict[str, Any]:
    """Parse a JSON response of the API server, without parts that are nested deeper than `untrusted.MAX_DEPTH`."""
    answer: dict[str, Any] = json.loads(text)
    return untrusted.empty_containers_below(answer) if untrusted.is_deeper(text, untrusted.MAX_DEPTH) else answer
