"""Record requests to a cloud and its responses in a file, without private data.

`broker check CLOUD --live --record FILE` writes one JSON object per line, in the order of the responses. Headers are
never recorded, since they carry the login. Equal private texts become equal placeholders, so that a fake of the cloud
can answer from the file.
"""

from __future__ import annotations

import ipaddress
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from broker.errors import UsageError
from broker.frozen import frozen


@frozen
class Exchange:
    """One request and its response. `operation`: the cloud's name for it, or method and path."""

    service: str
    operation: str
    region: str = ""
    request: str
    status: int
    answer: str
    took_s: float = 0.0


Listener = Callable[[Exchange], None]

# Text between these is private as a whole: scripts with keys, and keys.
BODIES = (
    re.compile(r"((?:^|&)[\w.]*UserData=)[^&]+"),
    re.compile(r"((?:^|&)[\w.]*PublicKeyMaterial=)[^&]+"),
    re.compile(r"(<userData>).*?(?=</userData>)", re.DOTALL),
    re.compile(r'("key":\s*"(?:ssh-keys|startup-script|user-data|windows-keys)",\s*"value":\s*")(?:[^"\\]|\\.)*'),
    re.compile(r'("value":\s*")(?:[^"\\]|\\.)*(?=",\s*"key":\s*"(?:ssh-keys|startup-script|user-data|windows-keys)")'),
    re.compile(r"(ssh-(?:rsa|ed25519) )[A-Za-z0-9+/=%]+"),
    re.compile(r"((?:access_token|id_token|refresh_token|client_secret)\"?[=:]\s*\"?)[^\"&\s]+"),
    re.compile(r"((?:SecretAccessKey|SessionToken)(?:>|\"?[=:]\s*\"?))[^\"<&\s]+"),
    re.compile(r"(Encoded authorization failure message: )[\w/+=-]+"),  # names who called, and what was refused
    re.compile(r"(X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)=)[^&\s\"]+", re.IGNORECASE),
)
# kind of placeholder -> pattern of the texts that it replaces
WORDS = {
    "mail": re.compile(r"[\w.+-]+(?:@|%40)[\w-]+\.[\w.-]*\w"),
    "principal": re.compile(r"\bA(?:KIA|SIA|IDA|ROA|GPA|NPA)[A-Z0-9]{12,}\b"),
    "user": re.compile(
        r"(?<=:user/)[\w+=,.@/-]+|(?<=:assumed-role/)[\w+=,.@/-]+|(?<=%3Auser%2F)[\w+=,.@%-]+|(?<=%3Aassumed-role%2F)[\w+=,.@%-]+"
    ),
    # An AWS account; in a URL, its colons are escaped. Google's numbers of projects have other lengths, too.
    "account": re.compile(
        r"(?:(?<![\w.-])|(?<=%3A)|(?<=%2F))\d{12}(?![\w.-])|(?<=projects/)\d{6,}|(?<=projects%2F)\d{6,}"
    ),
    "token": re.compile(r"\b[0-9a-f]{32}\b"),
}
ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
ADDRESS_6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}(?::|%3A)){2,7}[0-9A-Fa-f]{0,4}(?![\w:.])")
ADDRESSES = [f"{block}.{last}" for block in ("203.0.113", "198.51.100", "192.0.2") for last in range(1, 255)]
SHAPES = {
    "mail": "user-{}@example.com",
    "principal": "AIDA{:016}",
    "user": "user-{}",
    "account": "{:012}",
    "token": "{:032x}",
}


def cut_bodies(text: str) -> str:
    """Remove scripts and keys, which are private as a whole."""
    for pattern in BODIES:
        text = pattern.sub(r"\1scrubbed", text)
    return text


class Scrubber:
    """Replaces private text. `known`: private texts such as a project's name, each with its placeholder."""

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self._known = {text: stands for text, stands in (known or {}).items() if text}
        self._found: dict[tuple[str, str], str] = {}

    def scrub(self, text: str) -> str:
        """Replace private data with placeholders; equal values get equal placeholders."""
        text = cut_bodies(text)
        for known in sorted(self._known, key=len, reverse=True):
            text = text.replace(known, self._known[known])
        for kind, pattern in WORDS.items():
            text = pattern.sub(lambda found, kind=kind: self._stand_in(kind, found[0]), text)  # type: ignore[misc]
        text = ADDRESS_6.sub(lambda found: self._hide_address_6(found[0]), text)
        return ADDRESS.sub(lambda found: self._hide_address(found[0]), text)

    def _stand_in(self, kind: str, text: str) -> str:
        if text in self._found.values() or text in self._known.values():
            return text  # already a placeholder
        number = 1 + sum(each == kind for each, _ in self._found)
        return self._found.setdefault((kind, text), SHAPES[kind].format(number))

    def _hide_address(self, text: str) -> str:
        """Replace a public address by one reserved for documentation (RFC 5737); private addresses reveal nothing."""
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError:
            return text  # a version number
        if not address.is_global:
            return text
        taken = sum(kind == "address" for kind, _ in self._found)
        return self._found.setdefault(("address", text), ADDRESSES[taken % len(ADDRESSES)])

    def _hide_address_6(self, text: str) -> str:
        """Replace a public IPv6 address by one reserved for documentation (RFC 3849)."""
        try:
            is_public = ipaddress.IPv6Address(text.replace("%3A", ":")).is_global
        except ValueError:
            return text  # a time, or a fingerprint
        if not is_public:
            return text
        number = 1 + sum(kind == "address 6" for kind, _ in self._found)
        return self._found.setdefault(("address 6", text), f"2001:db8::{number:x}")


class Tape:
    """Writes line by line, from the threads in which a cloud's library works."""

    def __init__(self, path: Path, scrubber: Scrubber) -> None:
        """Create the file. Raises UsageError if it cannot be created or exists already."""
        self._scrubber = scrubber
        self._lock = threading.Lock()
        self.count = 0
        try:
            self._file = path.open("x", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}", hints=["name a new file in an existing folder"]
            ) from None

    def add_exchange(self, exchange: Exchange) -> None:
        """Append an exchange without private data; callable from any thread."""
        with self._lock:
            fields = asdict(exchange)
            fields |= {name: self._scrubber.scrub(fields[name]) for name in ("operation", "request", "answer")}
            fields["took_s"] = round(exchange.took_s, 3)
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()
            self.count += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()
