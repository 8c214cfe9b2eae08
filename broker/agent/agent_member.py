"""Keep a runner connected to the head of its gang, wherever that is. Standard library only."""

from __future__ import annotations

import collections
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from broker.agent import agent_files, agent_gang, agent_head, agent_link, agent_wire

    Message = dict[str, Any]  # not evaluated on the nodes, which may have Python 3.8
else:
    import agent_files
    import agent_gang
    import agent_head
    import agent_link
    import agent_wire

TICK_S = 0.1
# How long a program continues without a head. A new one is named within seconds of the loss of its node; after this
# time the program ends, and the broker starts the next attempt from the newest checkpoint.
AWAY_S_MAX = 300.0
BACKLOG_CHARS_MAX = 1 << 20  # part of the log that is kept while there is no head
FACTS = ("setup", "exit", "notice", "cancel")  # repeated to each new head


class Membership:
    """The connection of one runner to the head of its gang, wherever that is.

    `on_message` gets the head's messages; {"type": "lost"} only if the run must end because of it. `lead` is called
    when this node is to take over: it starts a coordinator, and returns whether that succeeded.
    """

    def __init__(
        self,
        folder: Path,
        spec: Message,
        on_message: Callable[[Message], None],
        lead: Callable[[Message], bool],
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._rank = int(spec["rank"])
        self._is_elastic = bool(spec.get("nodes_min"))
        self._on_message = on_message
        self._lead = lead
        self._context = agent_wire.make_context(folder / agent_files.CREDENTIAL, is_server=False)
        self._lock = threading.RLock()
        self._link: agent_link.Link | None = None
        self._tries = 0
        self._number = 0  # the try that made the connection in use
        self._dead = -1  # the newest connection that was lost before it came into use
        self._epoch = -1  # the epoch of the head that this runner has joined
        self._facts: dict[str, Message] = {}
        self._backlog: collections.deque[str] = collections.deque()
        self._backlog_chars = 0
        self._away_since_s: float | None = None
        self._is_over = False
        self._has_started = False

    def join(self, is_cancelled: Callable[[], bool]) -> bool:
        """Join the head for the first time; return whether that succeeded within `agent_gang.JOIN_S`."""
        give_up_s = time.monotonic() + agent_gang.JOIN_S
        while time.monotonic() < give_up_s:
            if self._try_join():
                if self._is_elastic:
                    threading.Thread(target=self._follow, name="gang-follow", daemon=True).start()
                return True
            if is_cancelled():
                return False
            time.sleep(TICK_S)
        return False

    def send(self, kind: str, **fields: Any) -> bool:
        """Send a message. Facts and some of the log are kept for the next head; return False if nothing was sent."""
        with self._lock:
            if kind in FACTS:
                self._facts[kind] = fields
            if self._link is not None and self._link.send(kind, **fields):
                return True
            if kind == "log" and self._is_elastic:
                self._keep_log(str(fields["text"]))
            return False

    @property
    def is_headless(self) -> bool:
        """Return whether there is no head now."""
        return self._away_since_s is not None

    def end(self) -> None:
        """Join no other head any more: the run has ended on this node."""
        self._is_over = True

    def mark_started(self) -> None:
        """Note that the program starts: from now on it may continue without a head."""
        self._has_started = True

    def report_lost(self) -> None:
        """Report the head as lost for good."""
        if not self._is_over:
            self._is_over = True
            self._on_message({"type": "lost"})

    def _keep_log(self, text: str) -> None:
        self._backlog.append(text)
        self._backlog_chars += len(text)
        while self._backlog_chars > BACKLOG_CHARS_MAX:
            self._backlog_chars -= len(self._backlog.popleft())

    def _try_join(self) -> bool:
        head = agent_head.read_head(self._folder)
        port, epoch = head.get("port"), int(head.get("epoch", 0))
        if port is None or epoch < self._epoch:
            return False
        with self._lock:
            self._tries += 1
            number = self._tries
        try:
            address = (
                str(head["address"]) if int(head["rank"]) != self._rank else agent_head.find_own(self._folder, head)
            )
            link = agent_link.connect(
                address,
                int(port),
                self._context,
                self._rank,
                lambda message: self._handle_message(number, message),
                epoch=epoch,
            )
        except OSError:
            return False
        with self._lock:
            if self._dead == number:
                return False
            old, self._link, self._number = self._link, link, number
            self._epoch, self._away_since_s = epoch, None
            for kind, fields in self._facts.items():
                link.send(kind, **fields)
            while self._backlog:
                link.send("log", text=self._backlog.popleft())
            self._backlog_chars = 0
        if old is not None:
            old.close()
        return True

    def _handle_message(self, number: int, message: Message) -> None:
        if message["type"] != "lost":
            if number >= self._number:
                self._is_over = self._is_over or message["type"] in ("kill", "end")
                self._on_message(message)
            return
        with self._lock:
            if number != self._number:
                self._dead = max(self._dead, number)
                return
            self._link = None
            if self._is_over:
                return self._on_message(message)
            self._away_since_s = time.monotonic()
        if not self._can_wait():
            self.report_lost()

    def _can_wait(self) -> bool:
        """Return whether the program continues without a head. A program that has failed did not."""
        has_failed = bool(self._facts.get("exit", {}).get("returncode"))
        is_following = agent_head.is_followed(self._folder) if self._has_started else bool(self._spec.get("is_joining"))
        return self._is_elastic and is_following and not has_failed

    def _follow(self) -> None:
        """Join each new head that the broker names, and take over when it names this node."""
        while not self._is_over:
            head = agent_head.read_head(self._folder)
            epoch = int(head.get("epoch", 0))
            if epoch > self._epoch and int(head.get("rank", 0)) == self._rank and head.get("port") is None:
                if not self._take_over(head):
                    return self.report_lost()
            elif epoch > self._epoch or self.is_headless:
                self._try_join()
            since_s = self._away_since_s
            if since_s is not None and time.monotonic() - since_s > AWAY_S_MAX:
                return self.report_lost()
            time.sleep(TICK_S)
        return None

    def _take_over(self, head: Message) -> bool:
        """Coordinate the gang from now on. The port is recorded as if the broker had named it."""
        if not (self._has_started and self._can_wait() and self._lead(head)):
            return False
        agent_head.record_port(self._folder, int(head["epoch"]))
        return True
