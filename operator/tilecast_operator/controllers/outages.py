"""Outages of admission webhooks, such as those of a Kueue that is starting anew: one warning for each."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("tilecast")


class WebhookOutage:
    """Whether webhooks answer, by what the writes of all jobs say. Belongs to one event loop."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def failed(self, error: Exception) -> None:
        """Take note that one did not answer; the first that does not is told."""
        if self._since_s is None:
            self._since_s = time.monotonic()
            log.warning("jobs that wait are neither placed nor let go until a webhook answers: %s", error)

    def answered(self) -> None:
        """Take note that a write went through."""
        if self._since_s is not None:
            log.info("webhooks answer again after %.0f s", time.monotonic() - self._since_s)
            self._since_s = None
