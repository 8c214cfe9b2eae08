"""Record the token ids of a stream in a journal, so that another replica can continue it.

Engines that return token ids (`return_token_ids`) are sent the prompt's ids and the generated ones, with the remaining
number of tokens. The prompt's ids are in the first event (vLLM's chat, `trainers.serve`) or in its choice (completions
of vLLM and SGLang). Pure: events in, events out.

    client asks    {"prompt": "a", "max_tokens": 5, "stream": true}
    replica 1      prompt_token_ids [97], then token_ids [1], [2]; lost
    replica 2      {"prompt": [97, 1, 2], "max_tokens": 3, "resumed_tokens": 2}; token_ids [3], [4], [5], finish
    client reads   one stream of five tokens with one id
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DONE = "[DONE]"
DEFAULT_TOKENS = 16  # the default of OpenAI's completions without `max_tokens`
EVENT_BYTES_MAX = 16 << 20
# Fields whose state is in the engine, or in text that the journal does not have. The two penalties count generated
# tokens only, which another replica gets as part of its prompt; `regex` to `stop_regex` are SGLang's.
UNSUPPORTED = (
    *("tools", "functions", "response_format", "logprobs", "top_logprobs", "echo", "suffix", "guided_json", "stop"),
    *("guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "prompt_logprobs", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "regex", "json_schema", "ebnf", "custom_logit_processor", "stop_regex"),
    *("logits_processors", "prompt_embeds", "use_beam_search", "kv_transfer_params"),
)
# Fields that have done their work once the prompt's ids are known: these would be cut to the last N once more.
CONSUMED = ("messages", "max_completion_tokens", "add_generation_prompt", "chat_template", "truncate_prompt_tokens")
ZERO_COUNTS = ("logprobs", "prompt_logprobs")  # 0 asks for those of the tokens themselves
TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal"))
ABORTED = "abort"  # `finish_reason` of vLLM and SGLang for a request that the engine ended, as on SIGTERM


class EventTooLongError(Exception):
    """An event exceeds the maximum number of bytes without ending."""


class EngineFaultError(Exception):
    """The engine has ended a stream that another replica can continue. `event` says so."""

    def __init__(self, event: str) -> None:
        super().__init__(event)
        self.event = event


class StreamJournal:
    """The journal of one stream. `request` is what the replica is sent first."""

    def __init__(self, path: str, fields: Mapping[str, Any], *, seed: int) -> None:
        self._is_chat = path.endswith(CHAT)
        self._given = fields
        self._fields = {"seed": seed, **fields}
        self.is_plain = False
        self._shows_ids = bool(fields.get("return_token_ids"))
        self._has_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
        self._requests_usage = False
        self._head: dict[str, Any] = {}
        self._prompt: list[int] = []
        self._ids: list[int] = []
        self._pending: list[int] = []
        self._is_continued = self._is_reasoning = False
        self._has_finish = self._has_sent_usage = False
        self.is_complete = False

    @classmethod
    def open(cls, method: str, path: str, body: bytes, *, seed: int, is_metered: bool = False) -> StreamJournal | None:
        """Return a journal if the request is a stream that can be continued elsewhere, otherwise None.

        `is_metered`: any stream has a journal, so that the engine can be asked for the numbers of its tokens.
        """
        if method != "POST" or not path.endswith((COMPLETIONS, CHAT)):
            return None
        fields = _read_fields(body)
        if fields.get("stream") is not True or not isinstance(fields.get("stream_options") or {}, dict):
            return None
        is_continuable = _is_continuable(fields)
        if not is_continuable and not is_metered:
            return None
        journal = cls(path, fields, seed=seed)
        if not is_continuable:
            journal.stop_requesting_ids()
        return journal

    def request_usage(self) -> None:
        """Request the token counts from the engine; the client receives them only if it requested them as well."""
        self._requests_usage = True

    def stop_requesting_ids(self) -> None:
        """Stop requesting ids, because the engine refuses them or they do not suffice.

        The stream ends with its replica.
        """
        self.is_plain = True

    @property
    def needs_context(self) -> bool:
        """Return whether the next replica must be given the number of tokens that fit: a chat may have no limit."""
        return bool(self._prompt and self._ids) and self._remaining is None

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of prompt and generated tokens that are known from ids; 0 without."""
        return len(self._prompt), len(self._ids)

    def make_request(self, context_tokens: int | None = None) -> tuple[str | None, dict[str, Any]]:
        """Return path and body for the next replica; path None: the client's own because nothing was generated yet.

        `context_tokens`: how many tokens the engine accepts, prompt included, if that is known. A completion without
        `max_tokens` would end after 16.
        """
        asked = dict(self._given) if self.is_plain else {**self._fields, "return_token_ids": True}
        if self._requests_usage:
            asked["stream_options"] = {**(asked.get("stream_options") or {}), "include_usage": True}
        self._pending = []
        if self.is_plain or not self._prompt or not self._ids:
            return None, asked
        self._is_continued = True
        for name in CONSUMED:
            asked.pop(name, None)
        ids = [*self._prompt, *self._ids]
        rest = self._remaining
        if rest is None and context_tokens is not None:
            rest = max(1, context_tokens - len(ids))
        continued = {"prompt": ids, "max_tokens": rest}
        return COMPLETIONS, {**asked, **continued, "resumed_tokens": len(self._ids)}

    @property
    def _remaining(self) -> int | None:
        most = self._fields.get("max_completion_tokens") or self._fields.get("max_tokens")
        if most is None and not self._is_chat and "max_tokens" not in self._fields:
            most = DEFAULT_TOKENS
        return None if most is None else int(most) - len(self._ids)

    @property
    def is_resumable(self) -> bool:
        """Return whether another replica can continue: nothing was sent yet, or all ids that were sent are known.

        Reasoning cannot be continued, because only the engine that began it separates it from the answer.
        """
        return not self._head or (bool(self._prompt) and not self.is_plain and not self._is_reasoning)

    def close(self) -> list[str]:
        """Return the events that complete the stream without a replica, if only its end is missing."""
        if self.is_complete:
            return []
        if not self._has_finish and (self._remaining is None or self._remaining > 0):
            return []
        events = [] if self._has_finish else [self._make_finish()]
        if self._has_usage and not self._has_sent_usage:
            events.append(json.dumps({**self._head, "choices": [], "usage": self._count()}))
        self.is_complete = self._has_finish = True
        return [*events, DONE]

    def take(self, event: str, *, is_final: bool = False) -> str | None:
        """Record an event of the replica; return it as the client gets it, or None to drop it.

        Raises EngineFaultError if the event ends a stream that another replica can continue, unless `is_final`: then
        the client gets it.
        """
        if event == DONE:
            self.is_complete = True
            return DONE
        try:
            chunk = json.loads(event)
        except (ValueError, RecursionError):
            return event
        if not is_final and self.is_resumable and _is_fault(chunk):
            raise EngineFaultError(event)
        if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
            return event
        is_first = not self._head
        if is_first:
            self._head = {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
        is_only_usage = not chunk["choices"] and bool(chunk.get("usage"))
        if is_only_usage and self._requests_usage and not self._has_usage:
            return None
        if self.is_plain:
            return event
        place = self._take_prompt(chunk)
        if chunk["choices"] and self._holds_back(chunk["choices"][0]) and not is_first:
            return None
        if is_first and self._shows_ids and place is not None:
            place["prompt_token_ids"] = self._prompt
        if chunk.get("usage"):
            self._has_sent_usage = is_only_usage
            chunk["usage"] = self._count() if self._is_continued else chunk["usage"]
        return json.dumps({**chunk, **self._head}, separators=(",", ":"))

    def _take_prompt(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Record the prompt's ids, and take them out of the event; return the place where they were."""
        found = None
        for place in (chunk, *(each for each in chunk["choices"] if isinstance(each, dict))):
            if ids := place.pop("prompt_token_ids", None):
                found = place
                self._prompt = self._prompt or list(ids)
        return found

    def _holds_back(self, choice: dict[str, Any]) -> bool:
        """Record a choice; return whether its ids have no text yet because they begin a character.

        Such ids are not in the journal until the character is complete: another replica generates them again. An event
        without ids, or with other content such as reasoning, is passed on.
        """
        delta = choice.get("delta") or {}
        others = [value for name, value in delta.items() if name not in ("role", "content") and value]
        text = choice.get("text") or delta.get("content") or others
        self._is_reasoning = bool(others) or (self._is_reasoning and not text)
        ids = choice.pop("token_ids", None)
        self._pending += ids or []
        self._has_finish = self._has_finish or choice.get("finish_reason") is not None
        if self._is_continued and self._is_chat and "text" in choice:
            choice["delta"] = {"content": choice.pop("text")}
        is_held = ids is not None and not text and not self._has_finish
        if self._shows_ids:
            choice["token_ids"] = [] if is_held else list(self._pending)
        if not is_held:
            self._ids += self._pending
            self._pending = []
        return is_held

    def _make_finish(self) -> str:
        text: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        return json.dumps({**self._head, "choices": [{"index": 0, **text, "finish_reason": "length"}]})

    def _count(self) -> dict[str, int]:
        prompt, made = len(self._prompt), len(self._ids)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _is_continuable(fields: Mapping[str, Any]) -> bool:
    """Return whether ids and the remaining fields are all that another replica needs to continue a stream."""
    if any(fields.get(name) for name in UNSUPPORTED) or (fields.get("n") or 1) != 1:
        return False
    if any(type(fields.get(name)) is int for name in ZERO_COUNTS):
        return False
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt):
        return False  # several prompts, each with a stream
    messages = fields.get("messages")
    return not isinstance(messages, list) or all(map(_has_only_text, messages))


def _has_only_text(message: object) -> bool:
    """Return whether the ids of a message are all of it: those of an image or a sound only mark its place."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return all(isinstance(each, str) or (isinstance(each, dict) and each.get("type") in TEXT_PARTS) for each in parts)


def _is_fault(chunk: object) -> bool:
    """Return whether an event says that the engine failed or ended the request, and not that the request is wrong.

    vLLM and SGLang send one when they are terminated or their engine fails, and then end the stream as usual.
    """
    if not isinstance(chunk, dict):
        return False
    choices = chunk.get("choices")
    if isinstance(choices, list):
        return any(isinstance(each, dict) and each.get("finish_reason") == ABORTED for each in choices)
    error = chunk if chunk.get("object") == "error" else chunk.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return bool(error) and not (isinstance(code, int) and 400 <= code < 500)


def is_aborted(body: bytes) -> bool:
    """Return whether a whole response is one that its engine ended early, as on SIGTERM."""
    return b'"abort"' in body and _is_fault(_read_fields(body))


def read_prompt(body: bytes) -> bytes:
    """Return the prompt or messages of a request, empty if it has none: requests that begin alike share them."""
    fields = _read_fields(body)
    prompt = fields.get("prompt") or fields.get("messages") or ""
    return prompt.encode(errors="replace") if isinstance(prompt, str) else json.dumps(prompt).encode()


def _read_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object; none for anything else, which the engine has to refuse."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def frame_event(event: str) -> str:
    """Return an event as it is sent. Each of its lines is one of data: the client would drop the others."""
    data = event.replace("\n", "\ndata: ")
    return f"data: {data}\n\n"


class EventParser:
    """Splits the bytes of a stream of server-sent events into their data."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the data of the events that are complete now. Raises EventTooLongError."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise EventTooLongError(f"an event has more than {EVENT_BYTES_MAX >> 20} MiB")
        found = []
        for block in whole:
            lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines).decode(errors="replace"))
        return found
