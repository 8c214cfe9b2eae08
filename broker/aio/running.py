"""Open contexts for calls of the Python API, and wrap coroutines for callers without an event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from broker.app.clusters import LogChunk
from broker.app.container import Context
from broker.config import find_login

P = ParamSpec("P")
T = TypeVar("T")
Notes = Callable[[str], None]
SIGNALS_S = 0.5  # after which a missed signal is noticed at the latest


@contextmanager
def open_context(home: Path | None, on_note: Notes | None = None) -> Iterator[Context]:
    """Open a context, and close its store at the end. Use it only in the thread that opens it."""
    context = Context(home, on_note=on_note or (lambda text: None))
    try:
        yield context
    finally:
        context.close()


async def use_in_thread(home: Path | None, on_note: Notes | None, call: Callable[[Context], T]) -> T:
    """Run `call` with a context in a separate thread, for work that would block the event loop."""

    def use() -> T:
        with open_context(home, on_note) as context:
            return call(context)

    return await asyncio.to_thread(use)


def is_remote(home: Path | None) -> bool:
    """Return whether the user of this state folder is logged in to a server."""
    return find_login(home) is not None


async def call_server(
    home: Path | None, on_note: Notes | None, verb: Callable[Concatenate[Context, P], T], **named: Any
) -> T:
    """Run a verb on the server of the login, in a separate thread. A cancelled call continues on the server.

    The thread is not of the loop's executor: the end of the loop would wait for the response, perhaps for hours.
    """
    path = find_login(home)
    assert path is not None
    from broker.client.remote import RemoteSession

    session = RemoteSession.open(path, on_note=on_note or (lambda text: None))
    call: Callable[..., T] = partial(session.call, verb)
    return await _run_in_own_thread(partial(call, **named))


async def _run_in_own_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that neither a cancellation nor the end of the process waits for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_outcome: Callable[[], None]) -> None:
        if not done.done():
            set_outcome()

    def run() -> None:
        try:
            outcome = partial(done.set_result, work())
        except BaseException as error:  # the edge of the thread
            outcome = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop was closed after a cancellation
            loop.call_soon_threadsafe(finish, outcome)

    threading.Thread(target=run, name="server call", daemon=True).start()
    return await done


async def list_remote_lines(home: Path | None, verb: Callable[..., None], **named: Any) -> AsyncIterator[str]:
    """Yield the lines that a verb passes to `on_chunk` on the server. Raises the error that ends them.

    After `aclose` or a cancellation, the thread disconnects at the next lines.
    """
    loop, chunks, is_closed = asyncio.get_running_loop(), asyncio.Queue[LogChunk | None](), threading.Event()

    def pass_on(chunk: LogChunk) -> None:
        if is_closed.is_set():
            raise asyncio.CancelledError
        loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    async def work() -> None:
        try:
            await call_server(home, None, verb, **named, on_chunk=pass_on)
        finally:
            chunks.put_nowait(None)

    working = asyncio.ensure_future(work())
    try:
        while (chunk := await chunks.get()) is not None:
            for line in chunk.lines:
                yield line
        await working
    finally:
        is_closed.set()
        working.cancel()


def make_sync(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a synchronous function from a coroutine function. In a running loop (a notebook), it blocks the loop."""

    @functools.wraps(call)
    def run(*arguments: P.args, **named: P.kwargs) -> T:
        work = call(*arguments, **named)
        if not _has_loop():
            return asyncio.run(work)
        with ThreadPoolExecutor(1) as thread:
            runner = thread.submit(asyncio.Runner).result()
            try:
                return _wait_for(work, thread, runner)
            finally:
                thread.submit(runner.close).result()

    return run


def _wait_for(work: Coroutine[Any, Any, T], thread: ThreadPoolExecutor, runner: asyncio.Runner) -> T:
    """Run a coroutine in the thread. Ctrl-C in the caller cancels it; the thread would run, and be waited for."""
    task: asyncio.Task[Any] | None = None
    is_interrupted = False

    async def follow() -> T:
        nonlocal task
        task = asyncio.current_task()
        if is_interrupted and task is not None:
            task.cancel()
        return await work

    try:
        running = thread.submit(runner.run, follow())
        # A signal that arrives just before a wait begins does not interrupt it.
        while not futures.wait([running], timeout=SIGNALS_S).done:
            pass
        return running.result()
    except BaseException:
        is_interrupted = True  # before `task` is read: `follow` does so in the other order
        if task is not None:
            with suppress(RuntimeError):
                task.get_loop().call_soon_threadsafe(task.cancel)
        raise


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def make_sync_iterator(call: Callable[P, AsyncIterator[T]]) -> Callable[P, Iterator[T]]:
    """Make a synchronous generator function from an asynchronous one, which runs in a thread with its own loop."""

    @functools.wraps(call)
    def run(*arguments: P.args, **named: P.kwargs) -> Iterator[T]:
        source = call(*arguments, **named)
        with ThreadPoolExecutor(1) as thread:
            runner = thread.submit(asyncio.Runner).result()

            def wait(work: Coroutine[Any, Any, Any]) -> Any:
                return _wait_for(work, thread, runner)

            end: Any = object()

            async def step() -> Any:
                return await anext(source, end)

            try:
                while (item := wait(step())) is not end:
                    yield item
            finally:
                if isinstance(source, AsyncGenerator):
                    wait(source.aclose())
                thread.submit(runner.close).result()

    signature = inspect.signature(call)
    returned = str(signature.return_annotation).removeprefix("Async")  # `help` shows `Iterator[str]`
    changed: Any = run
    changed.__signature__ = signature.replace(return_annotation=returned)
    return run
