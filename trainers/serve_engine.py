"""Continuous batching: sequences join and leave a running batch between two tokens.

Readers get results only through the journal of a generation (`tokens`, then `finish`). A reader that is slower than the
engine finds there what it has not read, also after the end.
"""

import asyncio
import hashlib
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainers.serve_model import CachedModel

WAITING_MAX = 1024
TEMPERATURE_MIN = 1e-5  # below it, the most likely token is chosen: logits divided by less than that overflow
ABORTED = "abort"


class FullError(Exception):
    """The queue of waiting generations is full."""


class EngineFailedError(Exception):
    """The engine has failed and generates nothing any more."""


@dataclass(kw_only=True)
class Generation:
    """One request and its journal.

    `resumed` is the number of trailing ids of `prompt` that were generated earlier, perhaps by another replica.
    Sampling depends only on seed and position, so a continuation draws the same tokens as an uninterrupted generation.
    """

    prompt: list[int]
    tokens_max: int
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    resumed: int = 0
    stop_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None  # "stop" or "length", set after the last token; "abort": the engine has failed
    is_cancelled: bool = False
    notify: Callable[[], object] = lambda: None

    async def read(self) -> AsyncIterator[int]:
        """Yield all tokens in order as they are generated, to one reader at a time."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self.notify = lambda: loop.call_soon_threadsafe(changed.set)
        index = 0
        while True:
            changed.clear()
            is_over = self.finish is not None  # read before the tokens: none follow the end
            for token in self.tokens[index:]:
                index += 1
                yield token
            if is_over:
                return
            if index == len(self.tokens) and self.finish is None:
                await changed.wait()


class Engine:
    """Generates tokens for up to `slots` sequences at once, in a separate thread.

    An error in that thread ends the engine: what is in its cache is unknown then. All generations are aborted, no
    others are admitted, and `on_failure` is called.
    """

    def __init__(self, model: CachedModel, *, slots: int, vocabulary: int) -> None:
        """Create an idle engine. `vocabulary` is that of the tokenizer; the model's may be smaller, or padded."""
        self._model, self.vocabulary = model, min(vocabulary, model.vocabulary)
        self._free = list(range(slots))
        self._active: dict[int, Generation] = {}
        self._waiting: deque[Generation] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self.has_failed = False
        self.on_failure: Callable[[], object] = lambda: None
        self.token_count = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of running and waiting generations."""
        return len(self._active), len(self._waiting)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current token."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def submit(self, generation: Generation) -> None:
        """Queue a generation. Raises FullError if the queue is full, EngineFailedError."""
        with self._changed:
            if self.has_failed:
                raise EngineFailedError
            if len(self._waiting) >= WAITING_MAX:
                raise FullError
            self._waiting.append(generation)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._active and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
            try:
                self.step()
            except Exception:
                traceback.print_exc()
                self._fail()
                return

    def _fail(self) -> None:
        with self._changed:
            self.has_failed = True
            aborted = [*self._active.values(), *self._waiting]
            self._active.clear()
            self._waiting.clear()
        for each in aborted:
            each.finish = each.finish or ABORTED
            each.notify()
        self.on_failure()

    def step(self) -> None:
        """Admit waiting sequences, compute one token for each active one, and release those that ended."""
        for slot in [slot for slot, each in self._active.items() if each.is_cancelled]:
            self._release(slot, "stop")
        decoding = sorted(self._active)
        while self._free and self._waiting:
            self._admit(self._waiting.popleft())
        if not decoding:
            return
        rows = [self._active[slot] for slot in decoding]
        starts = [len(each.prompt) + len(each.tokens) - 1 for each in rows]
        logits = self._model.forward([[each.tokens[-1]] for each in rows], starts, decoding)
        for slot, row in zip(decoding, logits, strict=True):
            self._add(slot, row)

    def _admit(self, generation: Generation) -> None:
        if generation.is_cancelled:
            return
        slot = self._free.pop()
        self._active[slot] = generation
        self._add(slot, self._model.forward([generation.prompt], [0], [slot])[0])

    def _add(self, slot: int, logits: Tensor) -> None:
        generation = self._active[slot]
        position = generation.resumed + len(generation.tokens)
        token = choose_token(logits[: self.vocabulary], generation, position)
        self.token_count += 1
        if token in generation.stop_ids:
            self._release(slot, "stop")
            return
        generation.tokens.append(token)
        length = len(generation.prompt) + len(generation.tokens)
        if len(generation.tokens) >= generation.tokens_max or length >= self._model.context:
            self._release(slot, "length")
        else:
            generation.notify()

    def _release(self, slot: int, finish: str) -> None:
        generation = self._active.pop(slot)
        self._free.append(slot)
        generation.finish = finish
        generation.notify()


def choose_token(logits: Tensor, generation: Generation, position: int) -> int:
    """Return the most likely token, or draw one with a generator seeded by seed and position."""
    if generation.temperature < TEMPERATURE_MIN:
        return int(logits.argmax())
    scaled = logits.float() / generation.temperature
    if 0 < generation.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(generation.top_k).values[-1], float("-inf"))
    chances = torch.softmax(scaled, dim=-1)
    if generation.top_p < 1.0:
        ranked, order = chances.sort(descending=True, stable=True)
        is_over = ranked.cumsum(0) - ranked >= generation.top_p
        is_over[0] = False  # the most likely one always stays, also with a `top_p` of 0
        chances[order[is_over]] = 0.0
    digest = hashlib.blake2b(f"{generation.seed}/{position}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return int(torch.multinomial(chances, 1, generator=generator))


class Detokenizer:
    """Converts ids to text, and withholds ids whose text is incomplete: a character may span several ids.

    Its state depends only on the ids, so that after `skip` it continues where another instance stopped.
    """

    PENDING_MAX = 8  # otherwise a byte that cannot begin a character would be withheld until the end

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Start with no ids."""
        self._decode = decode
        self._ids: list[int] = []
        self._prefix = self._read = 0

    def skip(self, ids: Sequence[int]) -> None:
        """Process ids whose text has already been sent."""
        for each in ids:
            self.add(each)

    def add(self, token: int) -> tuple[str, list[int]]:
        """Add an id; return the text that is complete now with its ids, or both empty."""
        self._ids.append(token)
        before, now = self._decode(self._ids[self._prefix : self._read]), self._decode(self._ids[self._prefix :])
        is_complete = len(now) > len(before) and not now.endswith("\ufffd")
        if not is_complete and len(self._ids) - self._read < self.PENDING_MAX:
            return "", []
        return self._take(now[len(before) :])

    def flush(self) -> tuple[str, list[int]]:
        """Return the text of the withheld ids, and these ids."""
        before, now = self._decode(self._ids[self._prefix : self._read]), self._decode(self._ids[self._prefix :])
        return self._take(now[len(before) :])

    def _take(self, text: str) -> tuple[str, list[int]]:
        ids = self._ids[self._read :]
        self._prefix, self._read = self._read, len(self._ids)
        return text, ids
