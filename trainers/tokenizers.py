"""Text to token ids and back: `bytes` needs nothing; a folder is a Hugging Face model's; other names are tiktoken's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trainers.errors import TrainerError

# Older names for encodings that people know better by the model that brought them.
MODEL_ENCODINGS = {"gpt2": "gpt2", "gpt4": "cl100k_base", "gpt4o": "o200k_base"}


class Tokenizer(Protocol):
    """A reversible code for text."""

    name: str
    vocabulary: int  # ids are below this

    def encode(self, text: bytes) -> Sequence[int]:
        """Return ids of UTF-8 text; what looks like a special token is taken as text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; invalid UTF-8 is replaced."""
        ...

    @property
    def separator(self) -> Sequence[int]:
        """Ids put after each document."""
        ...


def create_tokenizer(name: str) -> Tokenizer:
    """Create the tokenizer of that name, or of a folder; one that is unknown or not installed is a TrainerError."""
    if name == "bytes":
        return ByteTokenizer()
    return HuggingFaceTokenizer(Path(name)) if "/" in name or Path(name).is_dir() else TiktokenTokenizer(name)


class ByteTokenizer:
    """Every byte is its own id."""

    name = "bytes"
    vocabulary = 256
    separator = (0,)

    def encode(self, text: bytes) -> Sequence[int]:
        """Return the bytes themselves."""
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Read as UTF-8."""
        return bytes(number for number in ids if number < self.vocabulary).decode("utf-8", "replace")


class TiktokenTokenizer:
    """One of the encodings of the package tiktoken, which fetches its table when first used."""

    def __init__(self, name: str) -> None:
        """Load the table, from the cache of tiktoken or the network."""
        try:
            import tiktoken
        except ImportError as error:
            raise TrainerError(
                f"the tokenizer `{name}` needs the package tiktoken: `pip install tiktoken`, or use `bytes`"
            ) from error
        try:
            self._encoding = tiktoken.get_encoding(MODEL_ENCODINGS.get(name, name))
        except Exception as error:  # an unknown name, or whatever the network brings
            raise TrainerError(f"tiktoken has no table for `{name}`: {error}") from error
        self.name = name
        self.vocabulary: int = self._encoding.n_vocab

    def encode(self, text: bytes) -> Sequence[int]:
        """Byte pair encoding."""
        ids: list[int] = self._encoding.encode_ordinary(text.decode("utf-8", "replace"))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; ids past the table, which a padded vocabulary has, are skipped."""
        text: str = self._encoding.decode([number for number in ids if number < self.vocabulary])
        return text

    @property
    def separator(self) -> Sequence[int]:
        """The end-of-text token."""
        return (self._encoding.eot_token,)


class HuggingFaceTokenizer:
    """The `tokenizer.json` of a model's folder, read by the package tokenizers."""

    def __init__(self, folder: Path) -> None:
        """Load the file; the end-of-text token is the one that `tokenizer_config.json` names."""
        try:
            import tokenizers
        except ImportError as error:
            raise TrainerError(f"the tokenizer in `{folder}` needs a package: `pip install tokenizers`") from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the package raises nothing more specific
            raise TrainerError(f"cannot read `{folder / 'tokenizer.json'}`: {error}") from error
        self.name = str(folder.resolve())
        self.vocabulary: int = self._tokenizer.get_vocab_size()
        self._end = self._find_end(folder / "tokenizer_config.json")

    def encode(self, text: bytes) -> Sequence[int]:
        """Return ids without special tokens."""
        ids: list[int] = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, special tokens included."""
        text: str = self._tokenizer.decode([number for number in ids if number < self.vocabulary], False)
        return text

    @property
    def separator(self) -> Sequence[int]:
        """The end-of-text token, if there is one."""
        return () if self._end is None else (self._end,)

    def _find_end(self, path: Path) -> int | None:
        try:
            token = json.loads(path.read_text()).get("eos_token")
        except (OSError, ValueError, AttributeError):
            return None
        content = token.get("content") if isinstance(token, dict) else token
        end: int | None = self._tokenizer.token_to_id(content) if isinstance(content, str) else None
        return end
