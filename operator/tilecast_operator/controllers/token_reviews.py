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
"""Answers that are kept, of either kind: forged tokens push out no true ones."""
BUSY_S = 1
"""What a client is asked to wait."""
MAX_REVIEWING = 32
"""TokenReviews under way: whoever floods us with tokens does not flood the API server."""
MAX_UNKNOWN = 24
"""Of them those about tokens that were never true: forged ones keep no reporter out whose token is due again."""


class TokenReviews:
    """Asks the API server, about each token once a minute."""

    def __init__(self, client: Api) -> None:
        self._client = client
        self._reviews: dict[bool, OrderedDict[bytes, tuple[float, Document]]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        """When each token was reviewed and with what answer, by whether it is somebody's."""
        self._reviewing = 0

    async def of(self, token: str) -> Document:
        """What the API server says of a token.

        Raises:
            Refused: it cannot be asked.
        """
        if not token:
            raise Refused("unauthenticated", 401, "there is no bearer token; project one with audience tilecast")
        digest, now_s = hashlib.sha256(token.encode()).digest(), time.monotonic()
        for reviews in self._reviews.values():
            known = reviews.get(digest)
            if known is not None and now_s - known[0] < REVIEW_HOLDS_S:
                return known[1]
        if self._reviewing >= (MAX_REVIEWING if digest in self._reviews[True] else MAX_UNKNOWN):
            raise Refused("unavailable", 503, "too many tokens are being reviewed; report again later", BUSY_S)
        self._reviewing += 1
        try:
            review = await self._client.create(
                "/apis/authentication.k8s.io/v1/tokenreviews", token_review(token, AUDIENCE), is_fenced=False
            )
        except (ApiError, *UNREACHABLE) as error:
            log.warning("a token cannot be reviewed: %s", error)
            text = "the token cannot be reviewed now; report again later"
            raise Refused("unavailable", 503, text, BUSY_S) from None
        finally:
            self._reviewing -= 1
        reviews = self._reviews[bool((review.get("status") or {}).get("authenticated"))]
        reviews[digest] = (now_s, review)
        while len(reviews) > MAX_REVIEWS:
            reviews.popitem(last=False)
        return review
