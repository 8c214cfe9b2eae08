"""Convert text to token files for `--data.path`: `python -m trainers.prepare book.txt corpus/ --output tokens`.

Documents keep their order, each is followed by the tokenizer's separator, and the last ones are kept for evaluation.
Files get their final names once they are complete.
"""

import argparse
import array
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainers.errors import TrainerError
from trainers.stream_source import UNFINISHED
from trainers.texts import find_text_files, read_documents
from trainers.tokenizers import Tokenizer, create_tokenizer

REPORT_S = 0.5
# Maximum size of a piece of text that is encoded at once, cut at line ends, to bound memory. Pieces are no smaller than
# they must be: some tokenizers begin each with a space (Llama 2's), and none joins what a cut separates.
PIECE_BYTES = 2**20
TYPECODES = {"uint8": "B", "uint16": "H", "uint32": "I"}


def main(arguments: Sequence[str]) -> int:
    """Parse the flags and write the files; return the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        files = [file for path in options.paths for file in find_text_files(Path(path))]
        tokenizer = create_tokenizer(options.tokenizer)
        prepare(files, Path(options.output), tokenizer, options.shard_tokens, options.validation_share, options.column)
    except (TrainerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(prog="python -m trainers.prepare", description="Convert text to token files.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="text, .jsonl or .parquet files, or folders of them")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder for the token files")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="`bytes`, an encoding of tiktoken such as `gpt2`, or a Hugging Face model's folder",
    )
    parser.add_argument("--shard-tokens", type=_positive, default=100_000_000, help="tokens per file (default: 100M)")
    parser.add_argument(
        "--validation-share", type=_share, default=0.01, help="share kept for evaluation, from the end (default: 0.01)"
    )
    parser.add_argument("--column", default="text", help="field or column with the text (default: text)")
    return parser


def prepare(
    files: Sequence[Path], output: Path, tokenizer: Tokenizer, shard_tokens: int, validation_share: float, column: str
) -> None:
    """Write `train-00000.bin`..., `val-00000.bin`... and `tokens.json`.

    Raises TrainerError if the folder already has such files.
    """
    output.mkdir(parents=True, exist_ok=True)
    if any(output.glob("*.bin")):
        raise TrainerError(
            f"`{output}` already contains token files\n\nhint: name another folder with `--output`, or remove them"
        )
    partial = output / UNFINISHED  # until all files are there: what is left of a run that was killed is no data
    partial.touch()
    dtype = next(
        name for name, bits in (("uint8", 8), ("uint16", 16), ("uint32", 32)) if tokenizer.vocabulary <= 1 << bits
    )
    total = sum(file.stat().st_size for file in files)
    boundary = total * (1.0 - validation_share)
    train = ShardWriter(output, "train", shard_tokens, TYPECODES[dtype])
    validation = ShardWriter(output, "val", shard_tokens, TYPECODES[dtype])
    progress = Reporter(total)
    slack = max(256, min(PIECE_BYTES, total // 1000))  # the boundary is met that closely
    done = 0
    for file in files:
        begin, size = done, file.stat().st_size
        seen = 0
        for document in read_documents(file, column):
            # The text of a parquet file is larger than the file, so its share of the whole is an estimate.
            parts = split(document, int(boundary) - begin - min(seen, size), slack)
            for piece in (piece for part in parts for piece in cut(part, PIECE_BYTES)):
                writer = train if begin + min(seen, size) < boundary else validation
                writer.append(tokenizer.encode(piece))
                seen += len(piece)
                progress.report(begin + min(seen, size), train.written + validation.written)
            writer = train if begin + min(seen, size) <= boundary else validation
            writer.append(tokenizer.separator)
        done = begin + size
    train.finish()
    validation.finish()
    about: dict[str, object] = {"dtype": dtype, "tokenizer": tokenizer.name, "vocabulary": tokenizer.vocabulary}
    if len(tokenizer.separator) == 1:
        about["separator"] = tokenizer.separator[0]
    about |= {"training_tokens": train.written, "validation_tokens": validation.written}
    partial.write_text(json.dumps(about, indent=1) + "\n")
    partial.replace(output / "tokens.json")
    progress.finish(train.written, validation.written, output)


def cut(document: bytes, piece_bytes: int) -> Iterator[bytes]:
    """Yield pieces of a document, cut at line ends where possible, so that few words are split."""
    start = 0
    while start < len(document):
        stop = start + piece_bytes
        if stop < len(document):
            line_end = document.rfind(b"\n", start, stop)
            stop = line_end + 1 if line_end > start else _character_start(document, stop)
        yield document[start:stop]
        start = stop


def split(document: bytes, place: int, slack: int) -> list[bytes]:
    """Return the parts before and after a place, or after the line there if it ends within `slack` bytes.

    Returns the document itself if the place is not within it.
    """
    if not 0 < place < len(document):
        return [document]
    stop = document.find(b"\n", place - 1, place + slack) + 1
    if not stop:
        stop = next((each for each in range(place, len(document)) if document[each] & 0xC0 != 0x80), len(document))
    return [document[:stop], document[stop:]]


class ShardWriter:
    """Writes token ids to a series of files of equal size."""

    def __init__(self, folder: Path, name: str, shard_tokens: int, typecode: str) -> None:
        """Set the names and size of the files; nothing is written yet."""
        self._folder, self._name, self._shard_tokens = folder, name, shard_tokens
        self._ids = array.array(typecode)
        self._shard = 0
        self.written = 0

    def append(self, ids: Sequence[int]) -> None:
        """Add ids, and write each file that becomes full."""
        self._ids.extend(ids)
        self.written += len(ids)
        while len(self._ids) >= self._shard_tokens:
            self._write(self._ids[: self._shard_tokens])
            self._ids = self._ids[self._shard_tokens :]

    def finish(self) -> None:
        """Write the remaining tokens."""
        if self._ids:
            self._write(self._ids)

    def _write(self, ids: "array.array[int]") -> None:
        if sys.byteorder == "big":
            ids.byteswap()
        target = self._folder / f"{self._name}-{self._shard:05d}.bin"
        partial = target.with_suffix(".partial")
        partial.write_bytes(ids.tobytes())
        partial.rename(target)
        self._shard += 1


class Reporter:
    """Reports progress on stderr at intervals."""

    def __init__(self, total_bytes: int) -> None:
        """Set the total number of bytes."""
        self._total = max(1, total_bytes)
        self._begin = self._told = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def report(self, done_bytes: int, tokens: int) -> None:
        """Print progress, unless the last report was recent."""
        now = time.monotonic()
        if now - self._told < (REPORT_S if self._is_terminal else 20 * REPORT_S):
            return
        self._told = now
        rate = tokens / (now - self._begin)
        line = f"{100 * done_bytes / self._total:5.1f} %  {tokens:,} tokens  {rate:,.0f} tokens/s"
        print(line, end="\r" if self._is_terminal else "\n", file=sys.stderr, flush=True)

    def finish(self, training: int, validation: int, output: Path) -> None:
        """Print the result on stdout."""
        print(f"{training:,} tokens for training and {validation:,} for evaluation are in `{output}`")


def _character_start(document: bytes, place: int) -> int:
    """Return the nearest place at or before that does not split a UTF-8 character, which has four bytes at most."""
    for back in range(4):
        if document[place - back] & 0xC0 != 0x80:
            return place - back
    return place


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError("must be in [0, 1)")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
