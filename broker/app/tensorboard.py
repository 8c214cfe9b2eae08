"""Write scalars in TensorBoard's format: an event file of checksummed records, each a small protocol buffer.

Record: length (8 bytes), its masked CRC-32C, the data, and theirs. `Event`: wall_time (1), step (2), file_version (3),
summary (5); its `Summary.Value`: tag (1), simple_value (2). tensorflow/core/lib/io/record_writer.cc, util/event.proto
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from broker.app.forwarding import list_metrics
from broker.errors import UsageError
from broker.types import Job, Progress

POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reversed


class EventFile:
    """An event file in a folder. Each line of progress is in the file when `send` returns."""

    def __init__(self, folder: Path, job: Job, *, now_s: float) -> None:
        self._path = folder / f"events.out.tfevents.{int(now_s)}.{job.stem}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._append(make_event(now_s, version="brain.Event:2"))
        except OSError as error:
            raise UsageError(f"cannot write `{self._path}`: {(error.strerror or 'no access').lower()}") from None

    def send(self, progress: Progress, *, now_s: float) -> None:
        """Append the scalars of a progress line."""
        if scalars := list_metrics(progress):
            self._append(make_event(now_s, step=progress.step, scalars=scalars))

    def end(self, job: Job, *, now_s: float) -> None:
        """Do nothing: event files have no end record."""

    def _append(self, event: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(make_record(event))
            file.flush()
            os.fsync(file.fileno())


def make_record(data: bytes) -> bytes:
    """Frame an event with its length and checksums."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", mask(find_crc32c(length))) + data + struct.pack("<I", mask(find_crc32c(data)))


def make_event(time_s: float, *, step: int = 0, version: str = "", scalars: Mapping[str, float] | None = None) -> bytes:
    """Encode an event."""
    parts = [b"\x09" + struct.pack("<d", time_s), b"\x10" + encode_varint(step)]
    if version:
        parts.append(b"\x1a" + encode_bytes(version.encode()))
    values = [
        b"\x0a" + encode_bytes(b"\x0a" + encode_bytes(tag.encode()) + b"\x15" + struct.pack("<f", value))
        for tag, value in (scalars or {}).items()
    ]
    return b"".join([*parts, b"\x2a" + encode_bytes(b"".join(values))] if values else parts)


def encode_bytes(data: bytes) -> bytes:
    """Encode bytes, prefixed with their length."""
    return encode_varint(len(data)) + data


def encode_varint(number: int) -> bytes:
    """Encode an integer in groups of seven bits, least significant first; a negative one as 64 bits."""
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def find_crc32c(data: bytes) -> int:
    """Return the CRC-32C of data.

    >>> hex(find_crc32c(b"123456789"))
    '0xe3069283'
    """
    found = 0xFFFFFFFF
    for byte in data:
        found = _list_crcs()[(found ^ byte) & 0xFF] ^ found >> 8
    return found ^ 0xFFFFFFFF


def mask(crc: int) -> int:
    """Mask a checksum, because the checksum of data that contains checksums is weak."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _list_crcs() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (POLYNOMIAL if number & 1 else 0)
        table.append(number)
    return table
