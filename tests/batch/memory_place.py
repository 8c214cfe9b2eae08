"""A bucket in memory on virtual time, which asserts that no result is ever replaced."""

from __future__ import annotations

from collections import defaultdict

from trainers.map_places import Entry


class MemoryPlace:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.requests = 0
        self._contents: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, Entry]] = defaultdict(dict)  # each folder -> all entries below it

    def list_entries(self, folder: str) -> list[Entry]:
        self.requests += 1 + len(self._folders[folder]) // 1000
        return [self._folders[folder][key] for key in sorted(self._folders[folder])]

    def list_files(self) -> list[str]:
        self.requests += 1 + len(self._folders["parts"]) // 1000
        return list(self._folders["parts"])

    def has(self, key: str) -> bool:
        self.requests += 1
        return key in self._contents

    def read(self, key: str) -> bytes | None:
        self.requests += 1
        return self._contents.get(key)

    def read_range(self, key: str, start: int, end: int, mark: str = "") -> bytes:
        return self._contents[key][start:end]

    def create(self, key: str, content: bytes) -> bool:
        self.requests += 1
        if key in self._contents:
            return False
        self._put(key, content)
        return True

    def write(self, key: str, content: bytes) -> None:
        self.requests += 1
        assert not key.startswith("part-"), "a result is only created"
        self._put(key, content)

    def delete(self, key: str) -> None:
        self.requests += 1
        assert not key.startswith("part-")
        self._contents.pop(key, None)
        for folder in self._list_folders(key):
            self._folders[folder].pop(key, None)

    def _put(self, key: str, content: bytes) -> None:
        self._contents[key] = content
        for folder in self._list_folders(key):
            self._folders[folder][key] = Entry(key, len(content), self.now_s)

    @staticmethod
    def _list_folders(key: str) -> list[str]:
        parts = key.split("/")
        return ["/".join(parts[:depth]) for depth in range(1, len(parts))] or ["parts"]
