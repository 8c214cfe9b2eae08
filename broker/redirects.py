"""Requests that carry a login go to the server that the user has named, and to no other (decision 398)."""

from __future__ import annotations

import http.client
import urllib.request
from typing import IO


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: they would send the request, and its login, to a server that the user has not named."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:  # fmt: skip
        """Return None: the redirect is then raised as an HTTPError."""
        return None
