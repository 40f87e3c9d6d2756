"""Who the operator is to the API server: its pod's service account, or what a kubeconfig says."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import kopf

from tilecast_operator.cluster.api import Connection


def read(kwargs: dict[str, Any]) -> kopf.ConnectionInfo | None:
    """Those of the pod or of the kubeconfig; for a kubeconfig that calls a program, the official client is asked.

    Args:
        kwargs: `settings` and `logger`, as kopf gives them to handlers.
    """
    info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
    has_any = info and (info.token or info.username or info.certificate_path or info.certificate_data)
    return kopf.login_via_client(**kwargs) if info and not has_any and find_spec("kubernetes") else info


def connection(info: kopf.ConnectionInfo | None) -> Connection | None:
    """The same as the writer takes it."""
    if info is None:
        return None
    return Connection(info.server, info.as_http_headers(), info.as_ssl_context(), info.proxy_url)
