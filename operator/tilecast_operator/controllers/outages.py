"""Outages of admission webhooks, such as those of a Kueue that restarts: one warning for each outage."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("tilecast")


class WebhookOutage:
    """Whether webhooks answer, according to the writes of all jobs. Belongs to one event loop."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def record_failure(self, error: Exception) -> None:
        """Record that a webhook did not answer; the first failure of an outage is logged."""
        if self._since_s is None:
            self._since_s = time.monotonic()
            log.warning("jobs that wait are neither placed nor let go until a webhook answers: %s", error)

    def record_success(self) -> None:
        """Record that a write succeeded."""
        if self._since_s is not None:
            log.info("webhooks answer again after %.0f s", time.monotonic() - self._since_s)
            self._since_s = None
