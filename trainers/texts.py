"""Read documents from files: plain text, one per JSON line, or one per parquet row. Imports nothing heavy."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from trainers.errors import TrainerError

TEXT_ENDINGS = (".txt", ".md", ".rst", ".text", ".py")
TABLE_ENDINGS = (".jsonl", ".parquet")


def find_text_files(path: Path) -> list[Path]:
    """Return the file itself, or all text files below a folder, in the order of their names."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TrainerError(f"`{path}` does not exist")
    files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_ENDINGS + TABLE_ENDINGS and file.is_file())
    if not files:
        endings = ", ".join(TEXT_ENDINGS + TABLE_ENDINGS)
        raise TrainerError(f"no file in `{path}` ends in one of {endings}; token files (.bin) are not text")
    return files


def read_documents(file: Path, column: str) -> Iterator[bytes]:
    """Yield the documents of one file as UTF-8."""
    if file.suffix == ".parquet":
        yield from _read_parquet(file, column)
    elif file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield _read_json(line, column, f"{file}:{number}")
    else:
        yield file.read_bytes()


def read_shipped_text() -> bytes:
    """Return text that ships with every Python: its language reference and parts of its library."""
    # Read as files instead of imported, so that no module runs.
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("pydoc_data/topics.py", "argparse.py", "datetime.py", "decimal.py", "typing.py", "this.py")
    paths = [path for path in (library / name for name in names) if path.exists()]
    return b"\n".join(path.read_bytes() for path in paths)


def _read_json(line: bytes, column: str, place: str) -> bytes:
    try:
        value = json.loads(line)[column]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{place}: no JSON object with a `{column}`; see `--data.column`") from error
    return str(value).encode("utf-8", "surrogatepass")


def _read_parquet(file: Path, column: str) -> Iterator[bytes]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise TrainerError(f"reading `{file}` needs the package pyarrow: `pip install pyarrow`") from error
    table = parquet.ParquetFile(file)
    if column not in table.schema_arrow.names:
        columns = ", ".join(table.schema_arrow.names)
        raise TrainerError(f"`{file}` has no column `{column}`; it has {columns}; see `--data.column`")
    for batch in table.iter_batches(columns=[column]):
        for value in batch.column(0):
            yield str(value.as_py() or "").encode("utf-8", "surrogatepass")
