"""Sources of token ids: memory-mapped token files, or text read as bytes.

A token file is a sequence of little-endian unsigned integers without a header, as nanoGPT writes them. `tokens.json`
beside it states their width and the tokenizer; without it, they are uint16 from the GPT-2 tokenizer.
"""

import hashlib
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainers.config import DataConfig
from trainers.data import Corpus, count_windows, split_windows
from trainers.errors import TrainerError
from trainers.stream import Stream, StreamCorpus, open_stream, open_stream_corpora
from trainers.stream_source import UNFINISHED, UNFINISHED_HINT
from trainers.texts import find_text_files, read_documents, read_shipped_text

ABOUT = "tokens.json"
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32}
# The format of nanoGPT's own files.
TOKENIZER_DEFAULT, VOCABULARY_DEFAULT, DTYPE_DEFAULT = "gpt2", 50257, "uint16"
# Text is kept in memory; larger texts must be converted to token files.
TEXT_BYTES_MAX = 2**30
PROBE_BYTES, PROBE_COUNT = 2**16, 16

Windows = Corpus | StreamCorpus


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The whole data, and the description of its ids."""

    training: Sequence[Tensor]
    validation: Sequence[Tensor]  # empty if a share of the training data is used instead
    tokenizer: str
    vocabulary: int
    fingerprint: str
    separator: int | None = None  # the id that ends a document, if known
    stream: Stream | None = None  # data that is fetched as needed; then the two fields above are empty
    dtype: torch.dtype = torch.uint8


def open_tokens(config: DataConfig) -> Tokens:
    """Open the data that the config names. Raises TrainerError if it cannot be read."""
    if config.stream:
        return _from_stream(open_stream(config.stream))
    if not config.path:
        return _from_text(read_shipped_text())
    path = Path(config.path)
    files = sorted(path.glob("*.bin")) if path.is_dir() else [path] if path.suffix == ".bin" else []
    if files:
        return _from_token_files(files)
    texts = find_text_files(path)
    size = sum(file.stat().st_size for file in texts)
    if size > TEXT_BYTES_MAX:
        raise TrainerError(
            f"`{path}` holds {size / 2**30:.1f} GiB of text; make token files of it first: "
            f"`python -m trainers.prepare {path} --output tokens`"
        )
    separator = b"\0" if len(texts) > 1 or texts[0].suffix in (".jsonl", ".parquet") else b""
    return _from_text(separator.join(document for file in texts for document in read_documents(file, config.column)))


def open_corpora(config: DataConfig, tokens: Tokens, context: int) -> tuple[Windows, Windows | None]:
    """Return the samples for training, and those for evaluation if any are kept."""
    if tokens.stream is not None:
        return open_stream_corpora(config, tokens.stream, tokens.dtype, context)
    count = sum(count_windows(shard, context) for shard in tokens.training)
    if tokens.validation:
        kept = sum(count_windows(shard, context) for shard in tokens.validation)
        training = Corpus(tokens.training, tokens.fingerprint, context, config.seed, range(count))
        return training, Corpus(tokens.validation, tokens.fingerprint, context, 0, range(kept)) if kept else None
    first, last = split_windows(count, config.validation_share)
    training = Corpus(tokens.training, tokens.fingerprint, context, config.seed, first)
    # Evaluation has a fixed seed, so that its result does not depend on the order of training.
    return training, Corpus(tokens.training, tokens.fingerprint, context, 0, last) if last else None


def _from_text(text: bytes) -> Tokens:
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    fingerprint = hashlib.sha256(text).hexdigest()
    return Tokens(
        training=[ids], validation=[], tokenizer="bytes", vocabulary=256, fingerprint=fingerprint, separator=0
    )


def _from_stream(stream: Stream) -> Tokens:
    about = _check_about(stream.about, f"{ABOUT} of `--data.stream`")
    return Tokens(
        training=[],
        validation=[],
        tokenizer=str(about["tokenizer"]),
        vocabulary=int(str(about["vocabulary"])),
        fingerprint=stream.fingerprint,
        separator=_find_separator(about),
        stream=stream,
        dtype=DTYPES[str(about["dtype"])],
    )


def _from_token_files(files: Sequence[Path]) -> Tokens:
    if (files[0].parent / UNFINISHED).exists():  # without `tokens.json`, any file would count as tokens of GPT-2
        raise TrainerError(f"the token files in `{files[0].parent}` are incomplete\n\n{UNFINISHED_HINT}")
    about = _read_about(files[0].parent / ABOUT)
    dtype = DTYPES[str(about["dtype"])]
    digest = hashlib.sha256()
    parts: dict[bool, list[Tensor]] = {False: [], True: []}
    for file in files:
        content = _map_file(file)
        _probe(digest, file.name, content)
        if content is not None and len(content) >= dtype.itemsize:
            ids = torch.frombuffer(content, dtype=dtype, count=len(content) // dtype.itemsize)
            parts[file.name.startswith("val")].append(ids)
    if not parts[False]:
        raise TrainerError(f"no token file to train on in `{files[0].parent}`: all are empty or begin with `val`")
    return Tokens(
        training=parts[False],
        validation=parts[True],
        tokenizer=str(about["tokenizer"]),
        vocabulary=int(str(about["vocabulary"])),
        fingerprint=digest.hexdigest(),
        separator=_find_separator(about),
    )


def _read_about(path: Path) -> dict[str, object]:
    try:
        return _check_about(json.loads(path.read_text()), f"`{path}`")
    except FileNotFoundError:
        return _check_about({}, "")
    except ValueError as error:
        raise TrainerError(f"`{path}` is not what `trainers.prepare` writes: {error}") from error


def _check_about(written: object, place: str) -> dict[str, object]:
    about: dict[str, object] = {
        "dtype": DTYPE_DEFAULT,
        "tokenizer": TOKENIZER_DEFAULT,
        "vocabulary": VOCABULARY_DEFAULT,
    }
    about |= written if isinstance(written, dict) else {"dtype": None}
    if about["dtype"] not in DTYPES or not isinstance(about["vocabulary"], int):
        raise TrainerError(f"{place} is not what `trainers.prepare` writes")
    return about


def _find_separator(about: Mapping[str, object]) -> int | None:
    """Return the id that ends a document; older files without this field use the default of their tokenizer."""
    usual = {"bytes": 0, TOKENIZER_DEFAULT: VOCABULARY_DEFAULT - 1}.get(str(about["tokenizer"]))
    separator = about.get("separator", usual)
    return separator if isinstance(separator, int) else None


def _map_file(file: Path) -> mmap.mmap | None:
    """Map a file into memory, shared by all ranks of a node; return None for an empty file."""
    with file.open("rb") as opened:
        if file.stat().st_size == 0:
            return None
        # Private and writable: torch has no read-only tensors, and warns about read-only mappings.
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def _probe(digest: "hashlib._Hash", name: str, content: mmap.mmap | None) -> None:
    """Hash name, size and evenly spaced pieces of a file: reading terabytes would take too long."""
    size = len(content) if content is not None else 0
    digest.update(f"{name}:{size}:".encode())
    if content is not None:
        for place in range(PROBE_COUNT):
            start = max(0, size - PROBE_BYTES) * place // (PROBE_COUNT - 1)
            digest.update(content[start : start + PROBE_BYTES])
