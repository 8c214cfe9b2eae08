"""Coordinate the gang on its head, to which each rank (its own included) has a link. Standard library only.

The head is rank 0 until its node is lost; `agent_head` describes how an elastic gang gets another one.
JSON lines over the TLS of `agent_link`. Up: hello {rank, epoch}, setup {returncode, fault, network}, network
{answer}, exit {returncode, unflushed}, log {text}, notice {notice_s}, cancel, beat. Down: welcome {epoch}, turn {cards,
share}, measure {...}, go, notice {notice_s}, kill {status, returncode, reason, faults}, end {status, returncode,
reason, unflushed}, beat.
"""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from broker.agent import agent_files, agent_link, agent_network, agent_wire

    Message = dict[str, Any]  # not evaluated on the nodes, which may have Python 3.8
else:
    import agent_files
    import agent_link
    import agent_network

JOIN_S = 120.0
LEAVE_S = 5.0
FINISH_S = 10.0  # for an elastic gang to end after its head
EX_IOERR = 74  # sysexits.h: the program succeeded, but its files did not arrive
SUCCESS = {"status": "SUCCEEDED", "returncode": 0, "reason": ""}


class Coordinator:
    """Decide for the gang, on its head: all set up -> go; one fails or is lost -> kill all; then report the outcome.

    A held gang also waits for `release`.

    With `nodes_min` the program is elastic: once it runs, any rank but the head may be lost, leave after a notice, and
    be replaced, as long as `nodes_min` ranks remain.

    After the loss of a head, one of its members starts a coordinator with a higher `epoch` for the remaining ranks
    (`survivors`), whose program runs. It admits only members that know its epoch; a member that knows a higher epoch
    deposes it.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        context: ssl.SSLContext,
        num_nodes: int,
        log: Path,
        nodes_min: int | None = None,
        is_held: bool = False,
        rank: int = 0,
        epoch: int = 0,
        survivors: frozenset[int] | None = None,
        survey: agent_network.NetworkSurvey | None = None,
    ) -> None:
        self._rank = rank
        self._epoch = epoch
        self._door = agent_link.MemberListener(listener, context, num_nodes, self._admit)
        self._num_nodes = num_nodes
        self._nodes_min = nodes_min or num_nodes
        self._log = log.open("ab", buffering=0)
        self._lock = threading.RLock()
        self._links: dict[int, agent_link.Link] = {}
        self._ready: set[int] = set()
        self._gone: set[int] = set() if survivors is None else set(range(num_nodes)) - survivors
        self._noticed: set[int] = set()
        self._unfit: dict[int, Message] = {}  # new ranks whose setup failed, with their outcomes
        self._has_started = survivors is not None
        self._survey = survey  # of the network, before the program starts
        self._is_held = is_held  # `run` also waits for the other tasks of the job group
        self._turn: Message | None = None
        self._left = threading.Semaphore(0)
        self._timers: list[threading.Timer] = []
        self._unflushed: dict[int, str] = {}  # rank -> why the files of a successful program did not arrive
        self._is_preempted = False
        self._verdict: Message | None = None
        self.failed_rank: int | None = None  # the rank whose program or setup failed first

    def start(self) -> None:
        """Accept members, and end the run if one has not joined after `JOIN_S` seconds."""
        self._door.start()
        self._set_timer(JOIN_S, self._check_joined)

    def close(self) -> None:
        """Stop listening, and close all connections without a message."""
        self._door.close()
        with self._lock:
            links = list(self._links.values())
            self._links = {}  # or the end of the first connection would be reported to the others as a loss
        for timer in self._timers:
            timer.cancel()
        for link in links:
            link.close()

    def wait_until_left(self) -> None:
        """Wait until the other ranks have written their outcomes and disconnected: the head writes its own last."""
        give_up_s = time.monotonic() + LEAVE_S
        for _ in range(len(self._links) - 1):
            self._left.acquire(timeout=max(0.0, give_up_s - time.monotonic()))

    def _set_timer(self, delay_s: float, function: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, function)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _admit(self, wire: agent_wire.Wire, rank: int, epoch: int) -> None:
        """Admit a rank once, and again from another node if an elastic gang has lost it."""
        if epoch != self._epoch:
            wire.release()
            if epoch > self._epoch:
                self._step_down()
            return
        link = agent_link.Link(wire, lambda message: self._handle(rank, link, message))
        with self._lock:
            is_lost = self._has_started and rank in self._gone and self._nodes_min < self._num_nodes
            if rank in self._links and not is_lost:
                wire.release()
                return
            self._links[rank] = link
            self._gone.discard(rank)
            self._noticed.discard(rank)
            self._unfit.pop(rank, None)
            link.send("welcome", epoch=self._epoch)
            if self._turn:
                link.send("turn", **self._turn)
            if self._verdict:
                link.send("kill", **self._verdict)
        link.start()

    def _step_down(self) -> None:
        """End the program of this node and leave the others alone: another node coordinates them."""
        with self._lock:
            if self._rank in self._links:
                self._links[self._rank].send("kill", status="FAILED", returncode=None, reason="another node took over")
        self.close()

    def broadcast_turn(self, held: Message) -> None:
        """Send the reservation to all ranks, including those that join later; each may then begin its setup."""
        with self._lock:
            self._turn = dict(held)
            self._broadcast("turn", **held)

    def _handle(self, rank: int, link: agent_link.Link, message: Message) -> None:
        with self._lock:
            if self._links.get(rank) is not link:
                return  # a new node has taken this one's place
            kind = message["type"]
            if kind == "log":
                self._write_log(rank, str(message["text"]))
            elif kind == "setup" and self._has_started and message["returncode"] != 0:
                self._handle_unfit(rank, *explain_setup(rank, message))
            elif kind == "setup":
                if self._survey:
                    self._survey.note(rank, message.get("network"))
                self._handle_setup(rank, *explain_setup(rank, message))
            elif kind == "network" and self._survey and self._survey.take(rank, message["answer"]):
                self._close_survey()
            elif kind == "exit":
                self._handle_exit(rank, message["returncode"], str(message.get("unflushed") or ""))
            elif kind == "notice":
                self._handle_notice(rank, message["notice_s"])
            elif kind == "cancel":
                self._fail("CANCELLED", None, "cancelled")
            elif kind == "lost":
                self._left.release()
                self._handle_lost(rank)

    def _handle_exit(self, rank: int, returncode: int, unflushed: str) -> None:
        self._gone.add(rank)
        is_leaving = rank in self._noticed and self._can_continue()
        if rank in self._unfit and is_leaving:
            self._links[rank].send("end", **self._unfit[rank])
        if unflushed and not is_leaving:  # others may still work: it is reported once all have ended
            self._unflushed[rank], returncode = unflushed, 0
        if returncode != 0 and not is_leaving:
            self._fail("FAILED", returncode, f"rank {rank} exited with {returncode}", rank)
        elif rank == self._rank and self._nodes_min < self._num_nodes and not self._verdict:
            # The head's result applies to all. A node that joined too late to take part must not wait.
            self._verdict = dict(SUCCESS)
            self._set_timer(FINISH_S, self._dismiss)
        self._finish()

    def _handle_unfit(self, rank: int, returncode: int | None, reason: str) -> None:
        """Record a new rank whose setup failed: the others continue, and the broker terminates this one."""
        self._noticed.add(rank)
        self._unfit[rank] = {"status": "FAILED_SETUP", "returncode": returncode, "reason": reason}

    def _dismiss(self) -> None:
        with self._lock:
            self._broadcast("kill", **SUCCESS)

    def _handle_notice(self, rank: int, notice_s: float) -> None:
        """Pass a preemption notice on to the whole gang unless the others can continue."""
        self._noticed.add(rank)
        if not self._is_preempted and not self._can_continue():
            self._is_preempted = True
            self._broadcast("notice", notice_s=notice_s)

    def _handle_lost(self, rank: int) -> None:
        if rank not in self._gone:
            self._gone.add(rank)
            if not self._can_continue():
                self._fail("FAILED", None, f"rank {rank} is lost")
            self._finish()

    def _can_continue(self) -> bool:
        """Return whether the gang can continue without the ranks that are gone or leaving; never before its start."""
        leaving = self._gone | self._noticed
        return (
            self._has_started
            and self._rank not in leaving
            and self._nodes_min <= self._num_nodes - len(leaving) < self._num_nodes
        )

    def _handle_setup(self, rank: int, returncode: int | None, reason: str) -> None:
        if returncode != 0:
            self._fail("FAILED_SETUP", returncode, reason, rank)
        self._ready.add(rank)
        if self._has_started:
            self._links[rank].send("go")
        else:
            self._go()

    @property
    def is_waiting(self) -> bool:
        """Return whether all ranks are set up and only the job group is still awaited."""
        return self._is_held and len(self._ready) == self._num_nodes

    def release(self) -> None:
        """Stop waiting for the job group. Repeated calls change nothing."""
        with self._lock:
            self._is_held = False
            self._go()

    def _go(self) -> None:
        if len(self._ready) == self._num_nodes and not (self._verdict or self._has_started or self._is_held):
            if self._survey and (request := self._survey.begin()):
                self._set_timer(request["limit_s"] + agent_network.SLACK_S, self._close_survey)
                self._broadcast("measure", **request)
            if self._survey and not self._survey.is_over:
                return
            self._has_started = True
            self._broadcast("go")

    def _close_survey(self) -> None:
        """Judge the network with the answers that have arrived, once: a fault ends the gang, otherwise it starts."""
        with self._lock:
            if self._survey is None or self._survey.is_over or self._verdict:
                return
            faults, line = self._survey.close()
            self._write_log(self._rank, f"broker: {line}\n")
            if faults:
                rank, reason = min(faults.items())
                named = {str(each): faults[each] for each in faults}
                self._fail("FAILED_SETUP", None, f"rank {rank}: {reason}", rank, faults=named)
            self._go()

    def _check_joined(self) -> None:
        with self._lock:
            if self._has_started:  # survivors that do not find their new head are lost
                for rank in sorted(set(range(self._num_nodes)) - set(self._links)):
                    self._handle_lost(rank)
            elif len(self._links) < self._num_nodes:
                missing = sorted(set(range(self._num_nodes)) - set(self._links))
                self._gone.update(missing)
                self._fail("FAILED", None, f"rank {missing[0]} did not join within {JOIN_S:g} s")
                self._finish()

    def _fail(
        self, status: str, returncode: int | None, reason: str, rank: int | None = None, **more: dict[str, str]
    ) -> None:
        """Record the first failure as the gang's; after a preemption notice blame no rank and let all save."""
        if self._verdict:
            return
        if self._is_preempted and status == "FAILED":
            returncode, reason, rank = None, "preempted", None
        self.failed_rank = rank
        self._verdict = {"status": status, "returncode": returncode, "reason": reason, **more}
        if reason != "preempted":
            self._broadcast("kill", **self._verdict)

    def _finish(self) -> None:
        if len(self._gone) == self._num_nodes:
            verdict = self._verdict or SUCCESS
            if self._unflushed and verdict["status"] == "SUCCEEDED":
                rank, unflushed = min(self._unflushed.items())
                reason = f"the program succeeded, but on rank {rank} {unflushed}"
                verdict = {"status": "FAILED", "returncode": EX_IOERR, "reason": reason, "unflushed": unflushed}
                self._verdict = verdict
            self._broadcast("end", **verdict)

    def _broadcast(self, kind: str, **fields: Any) -> None:
        """Send to all ranks, our own last: it is our own process, which exits on `end`."""
        for _, link in sorted(self._links.items(), key=lambda item: (item[0] == self._rank, -item[0])):
            link.send(kind, **fields)

    def _write_log(self, rank: int, text: str) -> None:
        prefix = f"(rank{rank}) " if rank else ""
        data = "".join(f"{prefix}{line}\n" for line in text.split("\n")[:-1])
        agent_files.append_log(self._log, data.encode("utf-8", "replace"))


def explain_setup(rank: int, message: Message) -> tuple[int | None, str]:
    """Return the exit code and the reason of a failure; a node with broken GPUs has no code, as no program failed."""
    fault = str(message.get("fault") or "")
    if fault:
        return None, f"rank {rank}: {fault}"
    return message["returncode"], f"setup exited with {message['returncode']} on rank {rank}"
