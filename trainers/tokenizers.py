"""Convert text to token ids and back: `bytes`, a folder of a Hugging Face model, or an encoding of tiktoken."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainers.errors import TrainerError

TOKENIZER_FILE = "tokenizer.json"
# Encodings by the better-known name of the model that introduced them.
MODEL_ENCODINGS = {"gpt2": "gpt2", "gpt4": "cl100k_base", "gpt4o": "o200k_base"}


class Tokenizer(Protocol):
    """A reversible encoding of text."""

    name: str
    vocabulary: int  # exclusive bound of ids

    def encode(self, text: bytes) -> Sequence[int]:
        """Return the ids of UTF-8 text. Special tokens in it are encoded as plain text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; invalid UTF-8 is replaced."""
        ...

    @property
    def separator(self) -> Sequence[int]:
        """The ids that are appended to each document."""
        ...


def create_tokenizer(name: str) -> Tokenizer:
    """Create a tokenizer by name or folder. Raises TrainerError if it is unknown or its package is not installed."""
    if name == "bytes":
        return ByteTokenizer()
    return HuggingFaceTokenizer(Path(name)) if "/" in name or Path(name).is_dir() else TiktokenTokenizer(name)


def find_tokenizer(about: Mapping[str, Any]) -> str:
    """Return the name of the tokenizer of a checkpoint with this description, or its folder, which may be missing."""
    folder = Path(str(about.get("init_from") or ""))
    if about.get("init_from") and (folder / TOKENIZER_FILE).is_file():
        return str(folder)
    if "tokenizer" in about:
        return str(about["tokenizer"])
    # An older checkpoint does not name that of its data.
    return str(folder) if about.get("init_from") and not folder.is_dir() else ByteTokenizer.name


def warn_of_other_tokenizer(name: str, folder: Path, *, is_gpt2: bool) -> None:
    """Warn if data of the tokenizer `name` is not for the pretrained model in `folder`: ids would mean other tokens."""
    theirs, mine = folder / TOKENIZER_FILE, Path(name) / TOKENIZER_FILE
    if not theirs.is_file() or (is_gpt2 and name == "gpt2"):
        return
    is_folder = "/" in name or Path(name).is_dir()
    if is_folder and (not mine.is_file() or mine.read_bytes() == theirs.read_bytes()):
        return  # equal, or unknown, because the data comes from another machine
    print(
        f"warning: the data was tokenized by `{name}`, and `--init-from {folder}` has a tokenizer of its own\n\n"
        f"hint: `python -m trainers.prepare TEXT --tokenizer {folder} --output tokens`, then `--data.path tokens`",
        file=sys.stderr,
        flush=True,
    )


class ByteTokenizer:
    """Each byte is its own id."""

    name = "bytes"
    vocabulary = 256
    separator = (0,)

    def encode(self, text: bytes) -> Sequence[int]:
        """Return the bytes themselves."""
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the bytes as UTF-8; replace invalid sequences."""
        return bytes(number for number in ids if number < self.vocabulary).decode("utf-8", "replace")


class TiktokenTokenizer:
    """An encoding of the package tiktoken, which downloads its table on first use."""

    def __init__(self, name: str) -> None:
        """Load the table from the cache of tiktoken or the network."""
        try:
            import tiktoken
        except ImportError as error:
            raise TrainerError(
                f"the tokenizer `{name}` needs the package tiktoken: `pip install tiktoken`, or use `bytes`"
            ) from error
        try:
            self._encoding = tiktoken.get_encoding(MODEL_ENCODINGS.get(name, name))
        except Exception as error:  # an unknown name, or any network error
            raise TrainerError(f"tiktoken has no table for `{name}`: {error}") from error
        self.name = name
        self.vocabulary: int = self._encoding.n_vocab

    def encode(self, text: bytes) -> Sequence[int]:
        """Return the ids of UTF-8 text, by byte pair encoding."""
        ids: list[int] = self._encoding.encode_ordinary(text.decode("utf-8", "replace"))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; skip ids beyond the table, which a padded vocabulary has."""
        text: str = self._encoding.decode([number for number in ids if number < self.vocabulary])
        return text

    @property
    def separator(self) -> Sequence[int]:
        """The end-of-text token."""
        return (self._encoding.eot_token,)


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face folder (`tokenizer.json`), read by the package tokenizers."""

    def __init__(self, folder: Path) -> None:
        """Load the file; the end-of-text token is the one that `tokenizer_config.json` names."""
        try:
            import tokenizers
        except ImportError as error:
            raise TrainerError(f"the tokenizer in `{folder}` needs a package: `pip install tokenizers`") from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # the package raises no specific type
            raise TrainerError(f"cannot read `{folder / 'tokenizer.json'}`: {error}") from error
        self.name = str(folder.resolve())
        # Not their number: between the ids of a vocabulary and those of added tokens there may be a gap.
        self.vocabulary: int = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._end = self._find_end(folder / "tokenizer_config.json")

    def encode(self, text: bytes) -> Sequence[int]:
        """Return ids without special tokens."""
        ids: list[int] = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens."""
        text: str = self._tokenizer.decode([number for number in ids if number < self.vocabulary], False)
        return text

    @property
    def separator(self) -> Sequence[int]:
        """The end-of-text token, if the tokenizer has one."""
        return () if self._end is None else (self._end,)

    def _find_end(self, path: Path) -> int | None:
        try:
            token = json.loads(path.read_text()).get("eos_token")
        except (OSError, ValueError, AttributeError):
            return None
        content = token.get("content") if isinstance(token, dict) else token
        end: int | None = self._tokenizer.token_to_id(content) if isinstance(content, str) else None
        return end
