"""Review the bearer tokens in reports of pods."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict

from tilecast_operator.kube.client import UNREACHABLE, Api, ApiError
from tilecast_operator.kube.documents import make_token_review
from tilecast_operator.kube.kinds import Document
from tilecast_operator.observed.reports import AUDIENCE, RefusedReport

log = logging.getLogger("tilecast")

MAX_REVIEWS = 4096
"""Most cached results, separately for valid and for other tokens, so that forged tokens displace no valid ones."""
BUSY_S = 1
"""Seconds that a client is asked to wait."""
MAX_REVIEWING = 32
"""Most concurrent TokenReviews, so that a flood of tokens does not reach the API server."""
MAX_UNKNOWN = 24
"""Number of concurrent TokenReviews at which a token that was never valid is refused.

So forged tokens do not keep out a reporter whose token is due for another review.
"""


class TokenReviewer:
    """Reviewer of tokens. It asks the API server and caches the results.

    Args:
        client: Client of the API server.
        cache_s: Time for which a result is cached, in seconds.
    """

    def __init__(self, client: Api, cache_s: float) -> None:
        self._cache_s = cache_s
        self._client = client
        self._reviews: dict[bool, OrderedDict[bytes, tuple[float, Document]]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        """Time and result of each token's review, separately for valid and for other tokens."""
        self._reviewing = 0

    async def review_token(self, token: str) -> Document:
        """Return the TokenReview of a token, from the cache or the API server.

        Raises:
            RefusedReport: There is no token, or it cannot be reviewed now.
        """
        if not token:
            raise RefusedReport("unauthenticated", 401, "there is no bearer token; project one with audience tilecast")
        digest, now_s = hashlib.sha256(token.encode()).digest(), time.monotonic()
        for reviews in self._reviews.values():
            known = reviews.get(digest)
            if known is not None and now_s - known[0] < self._cache_s:
                return known[1]
        if self._reviewing >= (MAX_REVIEWING if digest in self._reviews[True] else MAX_UNKNOWN):
            raise RefusedReport("unavailable", 503, "too many tokens are being reviewed; report again later", BUSY_S)
        self._reviewing += 1
        try:
            review = await self._client.create(
                "/apis/authentication.k8s.io/v1/tokenreviews", make_token_review(token, AUDIENCE), is_fenced=False
            )
        except (ApiError, *UNREACHABLE) as error:
            log.warning("a token cannot be reviewed: %s", error)
            text = "the token cannot be reviewed now; report again later"
            raise RefusedReport("unavailable", 503, text, BUSY_S) from None
        finally:
            self._reviewing -= 1
        reviews = self._reviews[bool((review.get("status") or {}).get("authenticated"))]
        reviews[digest] = (now_s, review)
        while len(reviews) > MAX_REVIEWS:
            reviews.popitem(last=False)
        return review
