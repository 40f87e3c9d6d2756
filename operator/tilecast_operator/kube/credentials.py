"""Credentials of the operator, from its pod's service account or from a kubeconfig."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import kopf

from tilecast_operator.kube.client import Connection


def read_credentials(kwargs: dict[str, Any]) -> kopf.ConnectionInfo | None:
    """Return the credentials of the pod or of the kubeconfig.

    If a kubeconfig calls a program for credentials, the official client is used.

    Args:
        kwargs: `settings` and `logger`, as kopf gives them to handlers.
    """
    info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
    has_any = info and (info.token or info.username or info.certificate_path or info.certificate_data)
    return kopf.login_via_client(**kwargs) if info and not has_any and find_spec("kubernetes") else info


def to_connection(info: kopf.ConnectionInfo | None) -> Connection | None:
    """Convert kopf's connection info to a `client.Connection`. For None, return None."""
    if info is None:
        return None
    return Connection(info.server, info.as_http_headers(), info.as_ssl_context(), info.proxy_url)
