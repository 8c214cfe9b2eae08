"""Text to token ids and back, by name: `bytes` needs nothing, all others are tiktoken's encodings."""

from collections.abc import Sequence
from typing import Protocol

from trainers.errors import TrainerError

# Older names for encodings that people know better by the model that brought them.
MODEL_ENCODINGS = {"gpt2": "gpt2", "gpt4": "cl100k_base", "gpt4o": "o200k_base"}


class Tokenizer(Protocol):
    """A reversible code for text."""

    name: str
    vocabulary: int  # ids are below this

    def encode(self, text: bytes) -> Sequence[int]:
        """Ids of UTF-8 text; what looks like a special token is taken as text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; what is no UTF-8 is replaced."""
        ...

    @property
    def separator(self) -> Sequence[int]:
        """Ids put after each document."""
        ...


def create_tokenizer(name: str) -> Tokenizer:
    """Make the tokenizer of that name; one that is unknown or not installed is a TrainerError."""
    return ByteTokenizer() if name == "bytes" else TiktokenTokenizer(name)


class ByteTokenizer:
    """Every byte is its own id."""

    name = "bytes"
    vocabulary = 256
    separator = (0,)

    def encode(self, text: bytes) -> Sequence[int]:
        """The bytes themselves."""
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Read as UTF-8."""
        return bytes(each for each in ids if each < self.vocabulary).decode("utf-8", "replace")


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
        """Ids past the table, which padding of the vocabulary allows, stand for nothing."""
        text: str = self._encoding.decode([each for each in ids if each < self.vocabulary])
        return text

    @property
    def separator(self) -> Sequence[int]:
        """The end-of-text token."""
        return (self._encoding.eot_token,)
