"""API keys of one service: hashed in `keys.json`, which commands replace and the balancer reads; usage in `usage.json`.

    broker-<id>-<secret>      the id finds the key, the SHA-256 of the whole is compared in constant time

The secret has 256 random bits, so a fast hash is enough. `keys.json` is written by commands only, `usage.json` by
the balancer only. Usage is written twice a second: a balancer that is killed loses the responses that were open, and at
most half a second of the ended ones. A revoked key stays in the file, so that a service that ever had keys stays
closed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from broker.errors import UsageError
from broker.frozen import frozen
from broker.locks import hold_lock
from broker.serve.files import ServiceFolder, read_file, write_file

PREFIX = "broker"
ID_BYTES, SECRET_BYTES = 5, 32


@frozen
class ApiKey:
    """One key. A limit that is None does not apply; `budget_tokens` counts prompt and generated tokens of all time."""

    id: str
    name: str
    digest: str
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budget_tokens: int | None = None


@frozen
class KeyRing:
    """All keys of a service by id, revoked ones included."""

    keys: Mapping[str, ApiKey] = field(default_factory=dict)

    def find(self, text: str) -> ApiKey | None:
        """Return the key that a client presents; None if it is unknown."""
        prefix, _, rest = text.partition("-")
        known = self.keys.get(rest.partition("-")[0])
        digest = hash_key(text)
        is_same = hmac.compare_digest(digest, known.digest if known else hash_key(""))
        return known if known and is_same and prefix == PREFIX else None


@frozen
class KeyUsage:
    """The usage of a key since it was created."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers together."""
        return self.prompt_tokens + self.completion_tokens


@frozen
class UsageBook:
    """The usage of all keys by id."""

    keys: Mapping[str, KeyUsage] = field(default_factory=dict)


def hash_key(text: str) -> str:
    """Return the SHA-256 of a key, in hexadecimal: keys are random, so a slow hash would add nothing."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def read_keys(folder: ServiceFolder) -> KeyRing:
    """Return the keys; empty if none was ever created. Raises StateError for a damaged file."""
    return read_file(folder.keys, KeyRing) or KeyRing()


def read_usage(folder: ServiceFolder) -> UsageBook:
    """Return the usage that the balancer wrote last. Raises StateError for a damaged file."""
    return read_file(folder.usage, UsageBook) or UsageBook()


def add_usage(books: Iterable[UsageBook]) -> UsageBook:
    """Return the sum of the usage at several balancers."""
    total: dict[str, KeyUsage] = {}
    for key_id, used in (entry for book in books for entry in book.keys.items()):
        known = total.get(key_id, KeyUsage())
        total[key_id] = KeyUsage(
            requests=known.requests + used.requests,
            prompt_tokens=known.prompt_tokens + used.prompt_tokens,
            completion_tokens=known.completion_tokens + used.completion_tokens,
        )
    return UsageBook(keys=total)


def create_key(
    folder: ServiceFolder,
    name: str,
    *,
    now_s: float,
    expires_s: float | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    budget_tokens: int | None = None,
) -> tuple[ApiKey, str]:
    """Add a key; return it and its text, which is stored nowhere. Raises UsageError for a name in use, StateError."""
    with hold_lock(folder.keys_lock):
        ring = read_keys(folder)
        if any(each.name == name and each.revoked_s is None for each in ring.keys.values()):
            raise UsageError(
                f"a key named `{name}` already exists", hints=["pass another `--name`, or revoke that key first"]
            )
        key_id = secrets.token_hex(ID_BYTES)
        text = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
        key = ApiKey(
            id=key_id, name=name, digest=hash_key(text), created_s=now_s, expires_s=expires_s,
            requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, budget_tokens=budget_tokens,
        )  # fmt: skip
        write_file(folder.keys, KeyRing(keys={**ring.keys, key_id: key}))
    return key, text


def revoke_key(folder: ServiceFolder, wanted: str, *, now_s: float) -> ApiKey:
    """Revoke a key by id or name; one that is revoked stays so. Raises UsageError for an unknown one, StateError."""
    with hold_lock(folder.keys_lock):
        ring = read_keys(folder)
        named = [each for each in ring.keys.values() if each.name == wanted and each.revoked_s is None]
        found = ring.keys.get(wanted) or (named[0] if named else None)
        if found is None:
            known = ", ".join(f"`{each.name}`" for each in ring.keys.values() if each.revoked_s is None)
            raise UsageError(
                f"unknown key `{wanted}`", hints=[f"known keys: {known}" if known else "the service has no keys"]
            )
        if found.revoked_s is None:
            found = replace(found, revoked_s=now_s)
            write_file(folder.keys, KeyRing(keys={**ring.keys, found.id: found}))
    return found
