"""Whose the tokens are with which pods report."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict

from tilecast_operator.cluster.api import UNREACHABLE, Api, ApiError
from tilecast_operator.cluster.documents import token_review
from tilecast_operator.cluster.view import Document
from tilecast_operator.observed.reports import AUDIENCE, Refused

log = logging.getLogger("tilecast")

REVIEW_HOLDS_S = 60.0
"""How long the answer to a TokenReview is taken for granted."""
MAX_REVIEWS = 4096
MAX_REVIEWING = 32
"""TokenReviews under way: whoever floods us with tokens does not flood the API server."""


class TokenReviews:
    """Asks the API server, about each token once a minute."""

    def __init__(self, client: Api) -> None:
        self._client = client
        self._reviews: OrderedDict[bytes, tuple[float, Document]] = OrderedDict()
        self._reviewing = 0

    async def of(self, token: str) -> Document:
        """What the API server says of a token.

        Raises:
            Refused: it cannot be asked.
        """
        if not token:
            raise Refused("unauthenticated", 401, "there is no bearer token; project one with audience tilecast")
        digest, now_s = hashlib.sha256(token.encode()).digest(), time.monotonic()
        known = self._reviews.get(digest)
        if known is not None and now_s - known[0] < REVIEW_HOLDS_S:
            return known[1]
        if self._reviewing >= MAX_REVIEWING:
            raise Refused("unavailable", 503, "too many tokens are being reviewed; report again later")
        self._reviewing += 1
        try:
            found = await self._client.create(
                "/apis/authentication.k8s.io/v1/tokenreviews", token_review(token, AUDIENCE)
            )
        except (ApiError, *UNREACHABLE) as error:
            log.warning("a token cannot be reviewed: %s", error)
            raise Refused("unavailable", 503, "the token cannot be reviewed now; report again later") from None
        finally:
            self._reviewing -= 1
        self._reviews[digest] = (now_s, found)
        while len(self._reviews) > MAX_REVIEWS:
            self._reviews.popitem(last=False)
        return found
