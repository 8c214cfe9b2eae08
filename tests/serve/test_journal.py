"""What a stream's journal asks of the next replica, and what it refuses to promise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.serve.journal import (
    CHAT,
    COMPLETIONS,
    DONE,
    EventParser,
    EventTooLongError,
    StreamJournal,
    frame_event,
    read_prompt,
)

PATH = "/v1/completions"


def open_journal(**fields: Any) -> StreamJournal | None:
    body = json.dumps({"prompt": "a", "stream": True, **fields}).encode()
    return StreamJournal.open("POST", PATH, body, seed=7)


def make_event(text: str, ids: list[int], finish: str | None = None, **more: Any) -> str:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}
    return json.dumps({"id": "x", "choices": [choice], **more})


@pytest.mark.parametrize(
    "fields",
    [{"stream": False}, {"n": 2}, {"tools": [{}]}, {"logprobs": 3}, {"prompt": ["a", "b"]}, {"response_format": "x"}],
)  # fmt: skip
def test_request_that_another_replica_cannot_continue_has_no_journal(fields: dict[str, Any]) -> None:
    assert open_journal(**fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0.2},
        {"presence_penalty": -1},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"regex": "a+"},
        {"json_schema": "{}"},
        {"ebnf": "root ::= 'a'"},
    ],
)  # fmt: skip
def test_request_whose_state_is_in_its_engine_has_no_journal(fields: dict[str, Any]) -> None:
    assert open_journal(**fields) is None


def test_defaults_that_clients_send_do_not_prevent_a_journal() -> None:
    defaults = {"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": None, "n": 1, "stop": None, "tools": []}
    assert open_journal(**defaults) is not None


@pytest.mark.parametrize(
    ("content", "is_kept"),
    [
        ("hi", True),
        ([{"type": "text", "text": "hi"}, "there"], True),
        ([{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}], False),
        ([{"image_url": "http://x/y.png"}], False),  # vLLM's short form
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], False),
    ],
)  # fmt: skip
def test_chat_about_an_image_has_no_journal(content: object, *, is_kept: bool) -> None:
    """The prompt's ids only mark the place of the image: another replica would continue without having seen it."""
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": content}]
    body = json.dumps({"messages": messages, "stream": True}).encode()
    assert (StreamJournal.open("POST", CHAT, body, seed=7) is not None) == is_kept


def test_prompt_that_was_truncated_is_not_truncated_again() -> None:
    journal = open_journal(max_tokens=5, truncate_prompt_tokens=2)
    assert journal is not None
    assert journal.make_request()[1]["truncate_prompt_tokens"] == 2
    journal.take(make_event("x", [1], prompt_token_ids=[97, 98]))
    assert "truncate_prompt_tokens" not in journal.make_request()[1]


def test_engine_that_sent_more_than_was_asked_is_not_asked_for_a_negative_number() -> None:
    journal = open_journal(max_tokens=1)
    assert journal is not None
    journal.take(make_event("xy", [1, 2], prompt_token_ids=[97]))
    assert journal.close()[-1] == DONE


def test_metered_stream_that_cannot_be_continued_passes_unchanged_and_hides_its_usage() -> None:
    body = json.dumps({"prompt": "a", "stream": True, "n": 2, "return_token_ids": True}).encode()
    journal = StreamJournal.open("POST", PATH, body, seed=7, is_metered=True)
    assert journal is not None
    journal.request_usage()
    path, asked = journal.make_request()
    assert path is None and "seed" not in asked and asked["stream_options"] == {"include_usage": True}
    for index in (0, 1):
        choice = {"index": index, "text": "", "token_ids": [195], "prompt_token_ids": [97], "finish_reason": None}
        event = json.dumps({"id": "x", "choices": [choice]})
        assert journal.take(event) == event, "the ids of several choices are not one stream"
    assert journal.take(json.dumps({"id": "x", "choices": [], "usage": {"prompt_tokens": 1}})) is None
    assert not journal.is_resumable and journal.close() == []


def test_request_without_token_streaming_has_no_journal() -> None:
    assert StreamJournal.open("GET", PATH, b"{}", seed=0) is None
    assert StreamJournal.open("POST", "/other", b'{"stream": true}', seed=0) is None
    assert StreamJournal.open("POST", PATH, b"\xff{", seed=0) is None


def test_request_that_is_no_object_or_has_odd_fields_is_left_to_the_engine() -> None:
    deep = b"[" * 100_000
    for body in (deep, b"[1]", b'{"stream": true, "stream_options": "usage"}'):
        assert StreamJournal.open("POST", COMPLETIONS, body, seed=1) is None
    assert read_prompt(deep) == b""


def test_event_without_an_end_is_not_collected_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.serve.journal.EVENT_BYTES_MAX", 10)
    parser = EventParser()
    assert parser.feed(b"data: a\n\ndata: ") == ["a"]
    with pytest.raises(EventTooLongError):
        parser.feed(b"bcdefghijk")


def test_continuation_has_all_ids_and_the_remaining_count() -> None:
    journal = open_journal(max_tokens=5, temperature=0.5)
    assert journal is not None
    assert journal.make_request()[0] is None
    journal.take(make_event("x", [1], prompt_token_ids=[97]))
    journal.take(make_event("y", [2, 3]))
    path, asked = journal.make_request()
    assert path == PATH and asked["prompt"] == [97, 1, 2, 3]
    assert (asked["max_tokens"], asked["resumed_tokens"], asked["seed"], asked["temperature"]) == (2, 3, 7, 0.5)


def test_ids_of_half_a_character_are_generated_again() -> None:
    journal = open_journal(max_tokens=5)
    assert journal is not None
    journal.take(make_event("x", [1], prompt_token_ids=[97]))
    assert journal.take(make_event("", [195])) is None
    assert journal.make_request()[1]["prompt"] == [97, 1]
    assert journal.take(make_event("", [195])) is None
    assert json.loads(journal.take(make_event("é", [169])) or "")["choices"][0]["text"] == "é"
    assert journal.make_request()[1]["prompt"] == [97, 1, 195, 169]


def test_missing_end_is_written_without_a_replica() -> None:
    journal = open_journal(max_tokens=1, stream_options={"include_usage": True})
    assert journal is not None
    journal.take(make_event("x", [1], prompt_token_ids=[97]))
    finish, usage, done = journal.close()
    assert json.loads(finish)["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"]["total_tokens"] == 2 and done == DONE
    unfinished = open_journal(max_tokens=2)
    assert unfinished is not None
    unfinished.take(make_event("x", [1], prompt_token_ids=[97]))
    assert unfinished.close() == []


def test_stream_without_ids_cannot_be_continued_after_its_first_event() -> None:
    journal = open_journal()
    assert journal is not None and journal.is_resumable
    deep = "[" * 100_000
    assert journal.take(deep) == deep, "what is no chunk is passed on"
    journal.take(json.dumps({"id": "x", "choices": [{"text": "a"}]}))
    assert not journal.is_resumable


def test_events_are_split_wherever_the_network_cuts_them() -> None:
    data = 'data: {"a": 1}\r\n\r\n: comment\n\ndata: é\n\ndata: [DONE]\n\n'.encode()
    for size in range(1, len(data)):
        parser = EventParser()
        found = [event for start in range(0, len(data), size) for event in parser.feed(data[start : start + size])]
        assert found == ['{"a": 1}', "é", "[DONE]"]


def test_event_of_several_lines_arrives_whole() -> None:
    sent = b": comment\r\ndata: {\r\ndata: }\r\n\r\ndata: \xc3\xa9\n\n"
    parser = EventParser()
    events = [event for byte in sent for event in parser.feed(bytes([byte]))]
    assert events == ["{\n}", "\u00e9"]
    assert EventParser().feed("".join(map(frame_event, events)).encode()) == events
