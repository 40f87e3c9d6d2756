"""Warnings about outages of admission webhooks, such as those of Kueue during a restart."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("tilecast")


class WebhookOutage:
    """Outage of the admission webhooks, as writes to jobs show it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def record_failure(self, error: Exception) -> None:
        """Record that a webhook did not answer; log the first failure of an outage."""
        if self._since_s is None:
            self._since_s = time.monotonic()
            log.warning("jobs that wait are neither placed nor let go until a webhook answers: %s", error)

    def record_success(self) -> None:
        """Record that a write succeeded; log the end of an outage."""
        if self._since_s is not None:
            log.info("webhooks answer again after %.0f s", time.monotonic() - self._since_s)
            self._since_s = None
