"""Run one verb in a thread, as a command would, and pass its output to the connection as frames."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from broker.app.consoles import Console, ScreenSize
from broker.app.verbs.batches import MapState, SweepState
from broker.app.verbs.launching import name_target
from broker.client.wire import ASKED, Signature, Verb, encode
from broker.clock import within
from broker.errors import BrokerError, StateError, UsageError
from broker.frozen import frozen
from broker.server.authorisation import SHELLS, check_verb, list_changed
from broker.server.context import DisconnectedError, Interruption, Policy, ServerContext
from broker.state.people import Role, Token
from broker.types import Job, Plan, Service

log = logging.getLogger(__name__)

ANSWER_S_MAX = 900.0
DRIVING = ("run_map", "run_sweep")  # end with their connection, like the commands; a repeated command continues
RECORDED = ("on_submitted", "on_recorded")  # callbacks that report work that has already begun
STARTING_JOBS = ("launch_jobs", "retry_job", "retry_group", *DRIVING)
INTERRUPT_S_MAX = 20.0  # less than the time that clients wait for a response
TARGET_MAX = 500  # characters of a target in the audit; a client may name anything
FRAMES_MAX = 256  # waiting to be sent: a slow client slows down the verb instead of filling the memory
Frame = Mapping[str, Any]


@frozen
class VerbRequest:
    """A verb with its decoded arguments, and the token of the user who sent it."""

    id: str
    verb: Verb
    signature: Signature
    arguments: Mapping[str, Any]
    token: Token


def list_submitted(result: object) -> Sequence[int]:
    """List the IDs of the jobs in a result, or in the data of a callback."""
    if isinstance(result, MapState):
        return result.jobs
    if isinstance(result, SweepState):
        return [each.job_id for each in result.runs]
    return [job.id for job in (result if isinstance(result, tuple) else (result,)) if isinstance(job, Job)]


class RunningVerb:
    """One running verb. Its frames end with a result or an error; `answer` resolves the question of a frame."""

    def __init__(self, request: VerbRequest, *, home: Path, policy: Policy, is_agreeing: bool = False) -> None:
        self._request = request
        self._home = home
        self._policy = policy
        self._is_agreeing = is_agreeing
        self._loop = asyncio.get_running_loop()
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self._room = threading.BoundedSemaphore(FRAMES_MAX)
        self._gone = threading.Event()
        self._answer: Future[bool] = Future()
        self._interruption = Interruption()
        self._console = Console()
        self._ended = asyncio.Event()

    @property
    def user(self) -> str:
        """Name of the user who sent the request."""
        return self._request.token.user

    async def cancel(self) -> None:
        """Interrupt the verb, as Ctrl-C in a command would, and wait briefly for its end."""
        self.answer(is_accepted=False)
        self._console.close()
        self._interruption.interrupt()
        with contextlib.suppress(TimeoutError):
            await within(self._ended.wait(), INTERRUPT_S_MAX)

    @property
    def has_ended(self) -> bool:
        """Whether the verb has ended; its frames may still be in transit."""
        return self._ended.is_set()

    def leave(self) -> None:
        """Record that the client has disconnected: a reading verb ends, any other continues without the client."""
        self._gone.set()
        self._console.close()
        self.answer(is_accepted=False)
        for _ in range(FRAMES_MAX):
            try:
                self._room.release()
            except ValueError:
                return

    def answer(self, *, is_accepted: bool) -> None:
        """Answer the open question; later answers are ignored."""
        if not self._answer.done():
            self._answer.set_result(is_accepted)

    def put_input(self, data: bytes, size: ScreenSize | None) -> bool:
        """Pass on what the user types, and the new size of the terminal; return False if too much is waiting."""
        return self._console.put(data, size)

    async def next_frame(self, timeout_s: float) -> Frame | None:
        """Return the next frame; None if there is none within `timeout_s` seconds."""
        try:
            frame = await within(self._frames.get(), timeout_s)
        except TimeoutError:
            return None
        try:
            self._room.release()
        except ValueError:
            pass  # `leave` has released all permits
        return frame

    def run(self) -> None:
        """Run the verb to completion, in the caller's thread."""
        verb, token = self._request.verb, self._request.token
        is_reading = verb.role is Role.VIEWER
        is_driving = verb.name in DRIVING or is_reading
        self._emit({"id": self._request.id})
        context = ServerContext(
            self._home, policy=self._policy, on_note=lambda text: self._emit({"note": text}),
            gone=self._gone if is_driving else None, interruption=self._interruption, console=self._console,
            token=token,
        )  # fmt: skip
        outcome, target = "done", ""
        last: Frame | None = None
        try:
            self._name_cluster(context)
            check_verb(context, token, verb, self._request.arguments)
            if not is_reading:
                target = self._name_changed(context)
            if verb.name in SHELLS:  # also recorded if the server dies in the middle
                context.store.audit.add(user=token.user, verb=verb.name, target=target, outcome="started")
            result = verb.function(context, **self._request.arguments, **self._make_callbacks())
            target = self._name_submitted(result) or target
            if isinstance(result, Service):
                context.bind((result.name, result.uid))
            last = {"result": encode(result)}
        except DisconnectedError:
            outcome = "disconnected"
        except asyncio.CancelledError:
            outcome = "interrupted"
            last = {"error": encode(BrokerError("interrupted"))}
        except BrokerError as error:
            outcome = type(error).__name__
            last = {"error": encode(error)}
        except Exception as error:
            log.exception("%s of %s failed", verb.name, token.user)
            outcome = type(error).__name__
            last = {"error": encode(BrokerError(f"bug in the server: {outcome}", hints=["see the server's log"]))}
        finally:
            try:
                context.settle()
                if not is_reading:  # recorded before the client is informed
                    context.store.audit.add(user=token.user, verb=verb.name, target=target, outcome=outcome)
            except Exception as error:  # the client must not wait forever
                log.exception("the end of %s of %s could not be recorded", verb.name, token.user)
                last = {"error": encode(StateError(f"the end of `{verb.name}` could not be recorded: {error}"))}
            finally:
                context.close()
            if last is not None:
                self._emit(last)
            self._loop.call_soon_threadsafe(self._ended.set)

    def _name_cluster(self, context: ServerContext) -> None:
        """Name the cluster of a launch without a name, before its owner is compared."""
        arguments = self._request.arguments
        if self._request.verb.name == "launch" and arguments["cluster"] is None:
            name = name_target(context, task=arguments["task"])
            self._request = replace(self._request, arguments={**arguments, "cluster": name})

    def _name_changed(self, context: ServerContext) -> str:
        """Return the target for the audit: only names and IDs, because other arguments may contain secrets."""
        verb, arguments = self._request.verb, self._request.arguments
        changed = [f"{kind.value} {name}" for kind, name in list_changed(context, verb, arguments)]
        if verb.name in SHELLS:
            changed.append(f"node {arguments['cluster']}-{arguments['rank']}")
        told = ", ".join(changed)
        return told if len(told) <= TARGET_MAX else told[: TARGET_MAX - 3] + "..."

    def _name_submitted(self, result: object) -> str:
        """Return the jobs submitted by the verb, for the audit; it has recorded their owner itself."""
        if self._request.verb.name not in STARTING_JOBS:
            return ""
        return ", ".join(f"job {job_id}" for job_id in list_submitted(result))

    def _make_callbacks(self) -> Mapping[str, Callable[[Any], None]]:
        def make(name: str) -> Callable[[Any], None]:
            def pass_on(value: Any) -> None:
                if name not in RECORDED:
                    self._interruption.check()
                if name in ASKED:
                    self._confirm_with_client(name, value)
                else:
                    self._emit({"call": name, "value": encode(value)})

            return pass_on

        return {name: make(name) for name in self._request.signature.callbacks}

    def _confirm_with_client(self, name: str, plans: Sequence[Plan]) -> None:
        """Wait for the client's answer. Raises UsageError if the client refuses, or does not answer in time."""
        if self._is_agreeing:
            return
        plans = [replace(plan, estimates=(plan.choice,)) for plan in plans]  # the client has already shown the others
        self._emit({"ask": name, "id": self._request.id, "value": encode(plans)})
        try:
            is_accepted = self._answer.result(ANSWER_S_MAX)
        except TimeoutError:
            is_accepted = False
        if not is_accepted:
            raise UsageError("the price was not accepted, so nothing was started")

    def _emit(self, frame: Frame) -> None:
        if self._gone.is_set():
            return
        self._room.acquire()
        self._loop.call_soon_threadsafe(self._frames.put_nowait, frame)
