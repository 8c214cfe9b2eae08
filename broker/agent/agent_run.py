"""Run one run on one node: wait for its turn, set up, run, clean up. Standard library only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.agent import (
        agent_container,
        agent_dead_runs,
        agent_delivery,
        agent_environment,
        agent_files,
        agent_flush,
        agent_gang,
        agent_group,
        agent_head,
        agent_lead,
        agent_limits,
        agent_member,
        agent_paths,
        agent_preflight,
        agent_record,
        agent_setup,
        agent_turn,
    )
else:
    import agent_container
    import agent_dead_runs
    import agent_delivery
    import agent_environment
    import agent_files
    import agent_flush
    import agent_gang
    import agent_group
    import agent_head
    import agent_lead
    import agent_limits
    import agent_member
    import agent_paths
    import agent_preflight
    import agent_record
    import agent_setup
    import agent_turn

GRACE_S = 5.0
TICK_S = 0.1
END_S = 15.0  # how long to wait for the coordinator's `end` once the gang's result is known
RETURNCODE_OF_KILL = 137
RETURNCODE_UNEXECUTABLE = 126  # as of a shell
LOST = {"status": "FAILED", "returncode": None, "reason": "the head is lost"}


class Runner:
    """Run the phases in the main thread, the coordinator's messages in the link's, and copy output in a third."""

    def __init__(self, run_id: int, listener: socket.socket | None) -> None:
        self._folder = agent_files.run_folder(run_id)
        spec = agent_files.read_json(self._folder / "spec.json")
        assert spec is not None, "submit wrote the spec"
        self._spec = spec
        self._id = run_id
        self._container = agent_container.find_container(spec, agent_files.HOME)
        self._listener = listener
        self._gang = agent_member.Membership(self._folder, spec, self._handle, self._lead)
        self._coordinator: agent_gang.Coordinator | None = None
        self._wake = threading.Event()
        self._is_go = False
        self._turn: dict[str, Any] | None = None  # the head's reservation on each node
        self._held: dict[str, Any] | None = None
        self._notice_s: float | None = None
        self._is_notice_sent = self._is_urged = False
        self._verdict: dict[str, Any] | None = None
        self._is_verdict_sent = False
        self._is_ended = False
        self._is_cancel_sent = self._is_ready_told = False
        self._flush_report = ""
        self._preflight = agent_preflight.Preflight(
            spec,
            self._folder,
            lambda phase, script, limit_s: self._run_phase(phase, script, limit_s=limit_s),
            lambda text: self._write_log(f"broker: {text}\n".encode()),
        )
        self._returncode: int | None = None
        self._log: IO[bytes] = (self._folder / "rank.log").open("ab", buffering=0)

    def run(self) -> None:
        """Run, and always write outcome.json: the status is the gang's, `own_returncode` this node's."""
        try:
            self._take_part()
        except Exception as error:  # a full disk, or a fault of ours: no program may be left without a runner
            traceback.print_exc()
            self._verdict = self._verdict or {**LOST, "reason": f"the runner failed: {error!r}"}
        self._gang.end()
        for phase in agent_dead_runs.PHASES if self._verdict and self._verdict["status"] != "SUCCEEDED" else ("run",):
            self._kill_marked(phase)
        if self._coordinator:
            self._coordinator.wait_until_left()
        outcome = agent_record.describe_outcome(
            self._verdict or LOST,
            own_returncode=self._returncode,
            failed_rank=self._coordinator.failed_rank if self._coordinator else None,
            fault=self._preflight.fault,
            envs=self._spec["envs"],
        )
        agent_record.write_outcome(self._folder, outcome)
        if self._coordinator and agent_head.is_head(self._folder, self._spec):
            self._leave()

    def _take_part(self) -> None:
        agent_record.write_state(self._folder, agent_turn.PENDING)
        agent_record.reserve(self._folder)
        if self._listener is not None:
            self._coordinator = agent_lead.coordinate(self._folder, self._spec, self._listener)
        if self._join():
            self._execute()
            self._await_end()

    def _await_end(self) -> None:
        """Wait for the coordinator's `end`: the programs of other ranks may run, and upload, for longer.

        The link reports a lost head. After a result or a notice, when all ranks are ending, the wait has a limit.
        """
        give_up_s = float("inf")
        while not self._is_ended and time.monotonic() < give_up_s:
            self._pause()
            if (self._verdict or self._notice_s is not None) and not agent_flush.has_mounts():
                limit_s = time.monotonic() + END_S + (self._notice_s or 0)
                give_up_s = limit_s if self._gang.is_headless else min(give_up_s, limit_s)  # which has its own limit

    def _leave(self) -> None:
        """Upload the outcome so that it survives this node. A failure does not fail the run; the watcher retries."""
        if agent_delivery.is_due(self._id) and (error := agent_delivery.deliver(self._id, is_waiting=True)):
            print(f"not uploaded to the bucket yet: {error}", file=sys.stderr)

    def _lead(self, head: dict[str, Any]) -> bool:
        coordinator = agent_lead.take_over(self._folder, self._spec, head)
        self._coordinator = coordinator or self._coordinator
        return coordinator is not None

    def _join(self) -> bool:
        has_joined = self._gang.join((self._folder / "cancel").exists)
        if not has_joined and (self._folder / "cancel").exists():
            self._verdict = {"status": "CANCELLED", "returncode": None, "reason": "cancelled"}
        return has_joined

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "go":
            self._is_go = True
        elif kind == "turn":
            self._turn = {"cards": message["cards"], "share": message["share"]}
        elif kind == "notice":
            self._notice_s = self._notice_s or float(message["notice_s"])
        elif kind == "measure":
            self._preflight.request(message)
        elif kind in ("kill", "end"):
            self._preflight.take_verdict(message)
            self._verdict = message if message.get("unflushed") else self._verdict or message
            self._is_ended = self._is_ended or kind == "end"
        elif kind == "lost" and not self._is_ended:
            self._verdict = self._verdict or dict(LOST)
            self._is_ended = True
        self._wake.set()

    def _execute(self) -> None:
        """Wait for our turn, set up, wait for the gang's `go`, run; a verdict ends each phase."""
        self._wait_turn()
        returncode = self._set_up() or (0 if self._verdict else self._preflight.check_gpus())
        self._send("setup", returncode=returncode, **self._preflight.describe())
        while returncode == 0 and not self._is_go and not self._verdict:
            self._pause()
            if (answer := self._preflight.measure()) is not None:
                self._send("network", answer=answer)
            self._await_group()
        if returncode == 0 and not self._verdict:
            self._gang.mark_started()
            agent_record.note_state(self._folder, "RUNNING")
            self._open_entrance()
            kills = agent_limits.count_oom_kills()
            returncode = self._run_phase("run")
            if (text := agent_limits.explain_kill(returncode, kills)) and not (self._verdict or self._notice_s):
                self._write_log(text.encode())  # without a verdict or notice, broker has not killed the program
        unflushed = self._flush()
        more = {"unflushed": unflushed} if returncode == 0 and unflushed else {}
        returncode = agent_gang.EX_IOERR if more else returncode
        self._send("exit", returncode=returncode, **more)
        self._returncode = returncode
        if returncode and self._gang.is_headless:  # it may have failed because of the lost node
            self._gang.report_lost()

    def _open_entrance(self) -> None:
        if self._spec.get("entrance"):
            import agent_entrance  # type: ignore[import-not-found]  # asyncio, which only replicas need

            agent_entrance.open_entrance(self._folder, self._spec)

    def _await_group(self) -> None:
        """On the head, report that a held gang is set up; release it once the other tasks of its group are known."""
        if self._coordinator and self._coordinator.is_waiting and not self._is_ready_told:
            self._is_ready_told = True
            agent_record.write_state(self._folder, "SETTING_UP", is_ready=True)
        if self._coordinator and agent_group.read_peers(self._folder) is not None:
            self._coordinator.release()

    def _wait_turn(self) -> None:
        """Wait until the requested accelerators are free; nodes other than the head first wait for its reservation.

        A managed job has its nodes to itself, and a head with an older agent sends no reservation.
        """
        is_led = int(self._spec["rank"]) > 0 and bool(self._spec.get("queue"))
        while not self._verdict:
            if not is_led or self._turn:
                given = self._turn if is_led else None
                record = partial(agent_record.write_state, self._folder, "SETTING_UP")
                self._held = agent_turn.take(self._id, self._spec, record, given)
            if self._held:
                if self._coordinator:
                    self._coordinator.broadcast_turn(self._held)
                break
            for other in agent_files.list_run_ids():
                if other != self._id:
                    agent_dead_runs.end_if_dead(other)  # the watcher may have been killed with its runner
            self._pause()

    def _set_up(self) -> int:
        """Run `setup`, unless an earlier run of the same job did so on this node: it may not be repeatable."""
        digest, path = self._spec.get("setup_digest"), agent_files.STATE / "setup.json"
        if digest and (agent_files.read_json(path) or {}).get("digest") == digest:
            return 0
        returncode = agent_setup.set_up(self._spec, self._folder, partial(self._run_phase, "setup"))
        if digest and returncode == 0 and not self._verdict:
            agent_files.note_json(path, {"digest": digest})
        return returncode

    def _flush(self) -> str:
        """Wait until written files are in their buckets; return "" or why they are not.

        The run ends only afterwards, so the cluster is kept until then, whether the program succeeded, failed, was
        cancelled or got a preemption notice.
        """
        flush = agent_flush.Flush(hold_s=agent_flush.read_hold_s(self._spec["envs"]))
        while (state := flush.poll()) == "waiting":
            self._report_flush(flush.describe())
            if flush.is_retry_due() and (script := agent_flush.make_retry_script()):
                self._run_phase("flush", script)
            self._pause(agent_flush.POLL_S)
        if state == "failed":
            self._report_flush(unflushed := flush.describe_failure())
            return unflushed
        if self._flush_report:
            self._report_flush("written files have arrived", is_over=True)
        return ""

    def _report_flush(self, text: str, *, is_over: bool = False) -> None:
        if text != self._flush_report:
            self._flush_report = text
            self._write_log(f"broker: {text}\n".encode())
            agent_record.note_state(self._folder, "RUNNING", flush="" if is_over else text)

    def _run_phase(self, phase: str, script: str = "", *, limit_s: float | None = None) -> int:
        script = script or str(self._spec.get(phase) or "")
        if self._verdict:
            return RETURNCODE_OF_KILL
        if not script and not (self._container and phase == "setup"):
            return 0
        workdir = agent_files.HOME / "sky_workdir"
        workdir.mkdir(exist_ok=True)
        own = agent_environment.make_envs(
            self._spec, self._folder, mark=self._mark(phase), held=self._held, container=self._container
        )
        first = agent_paths.list_first(self._spec, self._container)
        argv, env = ["bash", "-c", script], agent_paths.put_first({**os.environ, **own}, first)
        folders = agent_paths.list_folders(own) if phase == "run" else []
        if self._container:  # created in `setup`, so that all nodes have it at the gang's `go`
            (self._folder / "progress.jsonl").touch(mode=0o600)
            path = self._folder / f"{phase}.sh"
            agent_container.write_script(path, script or "true", own, first=first, folders=folders)
            agent = str(Path(__file__).resolve().with_name("agent.py"))
            argv, env = [sys.executable, "-I", "-S", agent, "_contain", str(self._folder), phase], dict(os.environ)
        else:
            for error in agent_paths.make_folders(folders):
                self._write_log(error.encode())
        try:
            process = subprocess.Popen(
                argv, cwd=str(workdir), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:  # text that is too long for the kernel or has a null byte, or no bash
            self._write_log(f"broker: `{phase}` cannot be started: {error}\n".encode())
            return RETURNCODE_UNEXECUTABLE
        assert process.stdout is not None
        pump = threading.Thread(target=self._copy_output, args=(process.stdout,), daemon=True)
        pump.start()
        kill_s = None if limit_s is None else time.monotonic() + limit_s
        give_up_s = float("inf") if kill_s is None else kill_s + GRACE_S  # a call into a driver may not end at all
        while process.poll() is None and time.monotonic() < give_up_s:
            kill_s = self._signal_end(process.pid, phase, kill_s)
            self._pause()
        if process.poll() is None:
            return RETURNCODE_OF_KILL
        returncode = process.wait()
        if phase == "run":
            self._kill_marked(phase, process.pid)
        pump.join(GRACE_S)  # a daemon started by setup may hold the pipe open as long as it lives
        return returncode if returncode >= 0 else 128 - returncode

    def _signal_end(self, pid: int, phase: str, kill_s: float | None) -> float | None:
        """Send SIGTERM when the processes must end; return when (monotonic) they will be killed."""
        preempted = self._folder / "preemption"
        if self._notice_s is not None and not (self._is_urged or preempted.exists()):
            self._is_urged = True
            try:
                preempted.touch(mode=0o600)
            except OSError:
                pass  # on a full disk, the program still gets the signal
            self._signal(pid, phase, signal.SIGTERM)
            kill_s = time.monotonic() + self._notice_s
        if self._verdict and not self._is_verdict_sent:
            self._is_verdict_sent = True
            self._signal(pid, phase, signal.SIGTERM)
            kill_s = min(kill_s or float("inf"), time.monotonic() + GRACE_S)
        if kill_s is not None and time.monotonic() >= kill_s:
            self._signal(pid, phase, signal.SIGKILL)
        return kill_s

    def _signal(self, pid: int, phase: str, number: int) -> None:
        """Signal the processes of a phase.

        A container's client passes no signals on, and its end would cut off the last output, so it only gets SIGKILL.
        """
        if self._container:
            self._container.signal(self._mark(phase), number)
            if number != signal.SIGKILL:
                return
        agent_dead_runs.signal_group(pid, self._mark(phase), number)

    def _kill_marked(self, phase: str, session: int = 0) -> None:
        if self._container:
            self._container.signal(self._mark(phase), signal.SIGKILL)
        agent_dead_runs.kill_marked(self._mark(phase), session)

    def _pause(self, wait_s: float = TICK_S) -> None:
        """Wait one tick, then pass on a cancel request or preemption notice."""
        self._wake.wait(wait_s)
        self._wake.clear()
        if not self._is_cancel_sent and (self._folder / "cancel").exists():
            self._is_cancel_sent = self._send("cancel")
            if not self._is_cancel_sent and self._gang.is_headless:
                self._verdict = self._verdict or {"status": "CANCELLED", "returncode": None, "reason": "cancelled"}
                self._is_ended = True
        if not self._is_notice_sent:
            notice = agent_files.read_json(agent_files.STATE / "preemption")
            if notice:
                self._notice_s = self._notice_s or float(notice["notice_s"])
                self._is_notice_sent = self._send("notice", notice_s=self._notice_s)

    def _send(self, kind: str, **fields: Any) -> bool:
        return self._gang.send(kind, **fields)

    def _copy_output(self, output: IO[bytes]) -> None:
        """Copy output to our log with timestamps, and to the head's; available output goes in one message."""
        rest = b""
        while True:
            chunk = os.read(output.fileno(), 1 << 16)
            if not chunk:
                break
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline or len(rest) > 1 << 16:
                self._write_log(whole + newline if newline else rest + b"\n")
                rest = rest if newline else b""
        if rest:
            self._write_log(rest + b"\n")

    def _write_log(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime())
        agent_files.append_log(self._log, "".join(f"{stamp}{line}\n" for line in text.split("\n")[:-1]).encode())
        self._send("log", text=text)

    def _mark(self, phase: str) -> str:
        return agent_dead_runs.make_mark(self._id, phase)


def run(run_id: int, listener_fd: int | None) -> None:
    """Run to the end in this process; stderr goes to `runner.log`. `listener_fd`: the coordinator's socket."""
    agent_limits.allow_descriptors()
    fd = os.open(str(agent_files.run_folder(run_id) / "runner.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 2)
    Runner(run_id, None if listener_fd is None else socket.socket(fileno=listener_fd)).run()
