"""Nonces of logins, used once. They are signed and dated by this process, so none is stored before a login succeeds."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

from broker.clock import Clock
from broker.errors import AuthError

NONCE_S = 900.0  # from the beginning of a login to its end


class Nonces:
    """The nonces of one kind of login; nonces of other kinds or processes are invalid. `hints` are for retrying."""

    def __init__(self, clock: Clock, *, hints: Sequence[str]) -> None:
        self._clock = clock
        self._hints = list(hints)
        self._key = secrets.token_bytes(32)
        self._used: dict[str, float] = {}  # nonces of logins that succeeded, until they have expired

    def make(self) -> str:
        """Make a nonce that is recognised for `NONCE_S`."""
        text = f"{int(self._clock.now_s())}.{secrets.token_hex(16)}"
        return f"{text}.{self._sign(text).hex()}"

    def derive(self, nonce: str, purpose: str) -> str:
        """Return 43 characters that only this process can compute from a nonce, different for each purpose."""
        return base64.urlsafe_b64encode(self._sign(f"{purpose}/{nonce}")).decode().rstrip("=")

    def check(self, nonce: str) -> None:
        """Raise AuthError for a nonce that was not made here, has expired, or was used."""
        text, _, signature = nonce.rpartition(".")
        now_s = self._clock.now_s()
        is_nonce = re.fullmatch(r"[0-9]{1,12}\.[0-9a-f]{32}", text) and re.fullmatch(r"[0-9a-f]{64}", signature)
        if not is_nonce or not hmac.compare_digest(self._sign(text).hex(), signature):
            raise AuthError("this login was not started here", hints=self._hints)
        if not -1.0 <= now_s - float(text.partition(".")[0]) < NONCE_S:
            raise AuthError("this login took too long", hints=self._hints)
        if nonce in self._used:
            raise AuthError("this login was already completed", hints=self._hints)

    def spend(self, nonce: str) -> None:
        """Accept the nonce of a verified login, once: two requests may have waited for the issuer concurrently."""
        self.check(nonce)
        now_s = self._clock.now_s()
        self._used = {each: until_s for each, until_s in self._used.items() if until_s > now_s}
        self._used[nonce] = now_s + NONCE_S

    def _sign(self, text: str) -> bytes:
        return hmac.new(self._key, text.encode(), hashlib.sha256).digest()
