from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from broker.errors import TransientError
from broker.runtime.streams import open_program


def test_a_missing_program_leaves_no_socket_open() -> None:
    gc.collect()  # what earlier tests left open
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(FileNotFoundError):
            asyncio.run(open_program(["/nowhere/ssh"]))
        gc.collect()
    assert [each for each in caught if "unclosed <socket" in str(each.message)] == []


def test_a_program_exchanges_messages_line_by_line() -> None:
    async def act() -> object:
        stream = await open_program(["sh", "-c", 'read line; echo "{\\"heard\\": $line}"'])
        stream.write({"a": 1})
        heard = await stream.read()
        with pytest.raises(TransientError, match="ended"):
            await stream.read()
        stream.close()
        stream.write({"lost": True})
        return heard

    assert asyncio.run(act()) == {"heard": {"a": 1}}


def test_lines_of_a_start_up_file_precede_the_first_message_only() -> None:
    async def act() -> list[object]:
        script = "echo Welcome; echo 42; printf 'to host '; echo '{\"a\": 1}'; echo '{\"b\": 2}'; echo noise"
        stream = await open_program(["sh", "-c", script])
        heard: list[object] = [await stream.read(), await stream.read()]
        with pytest.raises(TransientError, match="not an object"):
            await stream.read()
        stream.close()
        return heard

    assert asyncio.run(act()) == [{"a": 1}, {"b": 2}]


def test_a_closed_stream_waits_for_its_program_which_ends_later() -> None:
    async def act() -> None:
        stream = await open_program(["sleep", "1"])
        stream.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(act())
        gc.collect()
    assert [each for each in caught if "still running" in str(each.message)] == []
