"""The contents of files while other processes write, replace and delete them."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def read_all(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield each file below a folder with its content, without those that vanish meanwhile."""
    for path in folder.rglob("*"):
        content = None
        with suppress(FileNotFoundError):
            content = path.read_bytes() if path.is_file() else None  # a pipe would wait for its writer
        if content is not None:
            yield path, content
