"""Run the agent on a node: `python3 -I -S agent.py VERB`, JSON on stdin, JSON on stdout. Standard library only.

Verbs: submit, access (agent_access.py), peers (agent_group.py), exchange (agent_exchange.py), head (agent_head.py),
status, log, cancel, lease, autostop, and follow, a persistent session (agent_follow.py). A server that was replaced is
refused (agent_epoch.py). All state is below ~/.broker. A watcher, started with the first verb that needs one, shuts the
node down when its lease expires, when its work is done while the broker is unavailable (agent_lease.py), or on
autostop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

TYPE_CHECKING = False  # `typing` would take a tenth of the time of a request
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from broker.agent import agent_epoch, agent_flush, agent_head, agent_lease, agent_ring
    from broker.agent import agent_files as files
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # `-I` omits it
    import agent_epoch
    import agent_files as files
    import agent_head
    import agent_lease
    import agent_ring

LINGER_S = 5.0  # minimum idle time before autostop: log followers can still read the last lines
WATCH_S = 0.5
POWER_OFF_S = 5.0  # time between two tries
COMMAND_S = 60.0  # limit of a shutdown command
LOG_BYTES_MAX = 1 << 20


def main(verb: str, *arguments: str) -> None:
    """Run one verb: read its request as JSON from stdin, print the response as one JSON object."""
    os.umask(0o077)
    files.make_private(files.RUNS)
    if not verb.startswith("_"):
        files.record_contact()
    if verb == "_run":
        import agent_run  # type: ignore[import-not-found]  # next to this file on the node; only the runner needs it

        agent_run.run(int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else None)
    elif verb == "_contain":
        import agent_container  # type: ignore[import-not-found]

        agent_container.main(*arguments)
    elif verb == "_setup":
        import agent_setup_steps  # type: ignore[import-not-found]

        agent_setup_steps.main(*arguments)
    elif verb == "_watch":
        watch()
    elif verb == "_restarted":  # called by the boot script's service
        ensure_watcher()
    elif verb == "follow":
        import agent_exchange  # type: ignore[import-not-found]  # noqa: F401  # as in `watch`
        import agent_flush  # type: ignore[import-not-found]  # noqa: F401
        import agent_follow  # type: ignore[import-not-found]

        guarded = {verb: agent_epoch.guard(VERBS[verb]) for verb in ("lease", "cancel", "exchange")}
        agent_follow.main(report_status, guarded)
    elif verb == "log":
        send_log(read_request())
    else:
        try:
            print(json.dumps(agent_epoch.guard(VERBS[verb])(read_request())))
        except agent_epoch.SupersededError as error:
            print(error, file=sys.stderr)
            sys.exit(agent_epoch.EXIT_CODE)


def read_request() -> dict[str, Any]:
    """Return the JSON object on stdin; empty input is an empty request."""
    text = sys.stdin.read()
    value = json.loads(text) if text.strip() else {}
    assert isinstance(value, dict), "a request is a JSON object"
    return value


def submit(spec: dict[str, Any]) -> dict[str, Any]:
    """Start a run, once: a repeated call returns the same answer. The head's answer applies to the whole gang.

    Only the first call sets the lease. A repeated call may come from a broker that was suspended after it computed the
    lease, which would then end later than intended, at additional cost.
    """
    run_id = int(spec["run_id"])
    folder = files.make_private(files.run_folder(run_id))
    lock = files.wait_lock(files.STATE / "submit.lock")
    try:
        submitted = files.read_json(folder / "spec.json")
        has_begun = files.is_locked(folder / "runner.lock") or (folder / "state.json").exists()
        is_first = submitted is None or not has_begun
        if is_first and spec.get("lease_s"):  # before the run, which must not outlive a call that is killed here
            agent_lease.renew(float(spec["lease_s"]))
        ensure_watcher()
        if submitted is None or is_first:
            submitted = begin(folder, spec)
    finally:
        os.close(lock)
    if not agent_head.is_head(folder, submitted):
        return {}
    ports = {"coordinator_port": agent_head.read_port(folder), "master_port": submitted["head"]["master_port"]}
    return {**ports, "credential": (folder / files.CREDENTIAL).read_text(encoding="ascii")}


def begin(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Start the runner. It inherits its lock and, on rank 0, the listening socket, so that neither is ever free."""
    runner_lock = files.take_lock(folder / "runner.lock")  # no runner holds it: `submit` has checked
    arguments, inherited = [str(spec["run_id"])], [runner_lock]
    head = dict(spec["head"])
    files.write_text(
        folder / files.CREDENTIAL, head.pop("credential")
    )  # a file, so that programs can be given its path
    if int(spec["rank"]) == 0 and not head.get("epoch"):
        import agent_link  # type: ignore[import-not-found]  # imports TLS, which no other verb needs

        listener = agent_link.listen(spec["node_ips"][0], int(spec["num_nodes"]))
        host, port = listener.getsockname()[:2]
        head.update(coordinator_port=port, master_port=agent_link.pick_port(), address=agent_link.find_own(host))
        if spec.get("is_held"):
            head["group_port"] = agent_link.pick_port()
        arguments.append(str(listener.fileno()))
        inherited.append(listener.fileno())
    spec = {**spec, "head": head}
    if "BROKER_REPLICA_PEM" in (spec.get("secrets") or {}):
        import agent_entrance  # type: ignore[import-not-found]  # only replicas of a service have an entrance

        spec = agent_entrance.take_secrets(folder, spec)
    files.write_json(folder / "spec.json", {**spec, "image": remember_image(spec.get("image"))})
    agent_head.record_first(folder, spec)
    start_detached("_run", arguments, inherited)
    os.close(runner_lock)
    return spec


def remember_image(image: str | None) -> str | None:
    """Return the run's image, else the previous run's: `exec` uses the image that the cluster was launched with."""
    path = files.STATE / "image.json"
    if image:
        files.write_json(path, {"image": image})
        return image
    return (files.read_json(path) or {}).get("image")


def start_detached(verb: str, arguments: list[str], inherited: list[int]) -> None:
    """Start an agent process in its own session, detached from the caller."""
    import subprocess

    script = str(Path(__file__).resolve())
    subprocess.Popen(
        [sys.executable, "-I", "-S", script, verb, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=inherited,
        cwd=str(files.HOME),
    )


def report_status(request: dict[str, Any]) -> dict[str, Any]:
    """Return the state of `run_id`, or of every run on this node, and how long the node has been idle, in seconds.

    Without `run_id`, `uploads` describes the files that wait for their upload (`agent_flush.report`).
    """
    ids = [int(request["run_id"])] if "run_id" in request else files.list_run_ids()
    existing = set(files.list_run_ids())
    return {
        "runs": [{**files.describe_run(run_id), **read_request_fields(run_id)} for run_id in ids if run_id in existing],
        "idle_s": measure_idle_s(),
        "is_advised": (files.STATE / "rebalance").exists(),  # the cloud recommends leaving this node
        "is_noticed": (files.STATE / "preemption").exists(),  # the cloud announced when it takes this node
        "lease_left_s": agent_lease.measure_left_s(),
        "uploads": report_uploads() if "run_id" not in request else None,
    }


def report_uploads() -> Any:
    """Return the pending uploads of this node's mounts (`agent_flush.report`); None without mounts."""
    if not (files.STATE / files.MOUNTS).exists():
        return None
    import agent_flush  # next to this file on the node, as all that is imported late

    return agent_flush.report()


def answer_status(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a call for the status; it includes the newest sample of the node, which a session pushes unasked."""
    sample = agent_ring.read_newest(files.STATE / agent_ring.NAME)
    return {**report_status(request), "samples": [sample] if sample else []}


def read_request_fields(run_id: int) -> dict[str, Any]:
    """Return the name, accelerators and port in a job group of a run, and the outcome of its setup's archive."""
    spec = files.read_json(files.run_folder(run_id) / "spec.json") or {}
    port = (spec.get("head") or {}).get("group_port")
    texts = {name: str(spec.get(name) or "") for name in ("name", "accelerators")}
    folder = files.run_folder(run_id)
    reports = {"setup": files.SETUP_REPORT, "network": files.NETWORK_REPORT}
    found = {name: files.read_json(folder / file) for name, file in reports.items()}
    return {**texts, "group_port": port, **found, **agent_head.describe(folder)}


def send_log(request: dict[str, Any]) -> None:
    """Write raw bytes of the merged log from `offset` to stdout, at most 1 MiB per call."""
    path = files.run_folder(int(request["run_id"])) / "log"
    if path.exists():
        with path.open("rb") as file:
            file.seek(int(request["offset"]))
            sys.stdout.buffer.write(file.read(LOG_BYTES_MAX))


def cancel(request: dict[str, Any]) -> dict[str, Any]:
    """Request the end of a run; its runner notices the file. Repeated calls and unknown runs change nothing."""
    folder = files.run_folder(int(request["run_id"]))
    if folder.exists():
        (folder / "cancel").touch(mode=0o600)
    return {}


def renew_lease(request: dict[str, Any]) -> dict[str, Any]:
    """Extend the node's lease to `lease_s` seconds from now, and make sure that its watcher runs."""
    agent_lease.renew(float(request["lease_s"]))
    ensure_watcher()
    return {}


def set_autostop(request: dict[str, Any]) -> dict[str, Any]:
    """Set the autostop; `idle_minutes` null removes it."""
    path = files.STATE / "autostop.json"
    if request.get("idle_minutes") is None:
        path.unlink(missing_ok=True)
        return {}
    rule = {"idle_minutes": float(request["idle_minutes"]), "is_down": bool(request["is_down"])}
    files.write_json(path, {**rule, "set_s": time.time(), "boot": files.read_boot()})
    ensure_watcher()
    return {}


def measure_idle_s() -> float:
    """Return the seconds since the last run ended, or since the agent's first use; 0 while a run is live."""
    newest = files.STATE.joinpath("boot")
    if not newest.exists():
        newest.touch(mode=0o600)
    since_s = newest.stat().st_mtime
    for run_id in files.list_run_ids():
        run = files.describe_run(run_id)
        if run["status"] not in files.TERMINAL:
            return 0.0
        since_s = max(since_s, float(run["ended_s"] or 0))
    return max(0.0, time.time() - since_s)


def ensure_watcher() -> None:
    """Start the watcher in a process of its own unless one holds the lock."""
    lock = files.try_lock(files.STATE / "watch.lock")
    if lock is not None:
        start_detached("_watch", [], [lock])
        os.close(lock)


def watch() -> None:
    """Watch the runs, the lease and the uploads of this node until it shuts down.

    All that it needs is imported at once: another version of the agent may replace these files while it works.
    """
    import threading

    import agent_access  # type: ignore[import-not-found]  # noqa: F401
    import agent_dead_runs  # type: ignore[import-not-found]  # noqa: F401
    import agent_delivery  # type: ignore[import-not-found]
    import agent_flush  # noqa: F401
    import agent_samples  # type: ignore[import-not-found]

    run_safely(start_notices)
    threading.Thread(target=agent_delivery.deliver_forever, daemon=True).start()
    threading.Thread(target=agent_samples.sample_forever, daemon=True).start()
    flush: agent_flush.Flush | None = None
    while True:
        flush = watch_once(flush)
        time.sleep(WATCH_S)


def watch_once(flush: agent_flush.Flush | None) -> agent_flush.Flush | None:
    """Clean up, and power off once that is due; return the wait for uploads before it, if there is one."""
    run_safely(clean_up)
    reason = run_safely(decide_power_off)
    if reason and reason != "lease":  # files may come from outside a run, or from one whose runner was killed
        import agent_flush

        flush = flush or agent_flush.Flush()
        reason = "" if run_safely(flush.poll) == "waiting" else reason
    else:
        flush = None
    if reason:
        run_safely(partial(power_off, reason))
        time.sleep(POWER_OFF_S)
    return flush


def run_safely(step: Callable[[], str | None]) -> str | None:
    """Return what `step` returns, or None if it fails: nothing but the watcher ends a node whose broker is gone."""
    try:
        return step()
    except Exception as error:  # a full disk, or a fault of ours
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return None


def clean_up() -> None:
    """End runs whose runner is gone, and delete credentials that no run needs."""
    import agent_access
    import agent_dead_runs

    for run_id in files.list_run_ids():
        agent_dead_runs.end_if_dead(run_id)
    agent_access.forget_used()


def start_notices() -> None:
    """Start a thread that watches for preemption notices if node.json names a cloud that gives them."""
    cloud = (files.read_json(files.STATE / "node.json") or {}).get("notices")
    if cloud:
        import threading

        import agent_notice  # type: ignore[import-not-found]

        threading.Thread(target=agent_notice.watch_notices, args=(cloud,), daemon=True).start()


def decide_power_off() -> str:
    """Return "" to stay, "lease", "done" or "autostop" to terminate the node, "stop" to stop it and keep its disk."""
    if reason := agent_lease.find_end():
        return reason
    rule = files.read_json(files.STATE / "autostop.json")
    if not rule:
        return ""
    try:
        idle_s = min(measure_idle_s(), agent_lease.measure_rule_s(rule))
        if idle_s >= max(rule["idle_minutes"] * 60, LINGER_S):
            return "autostop" if rule["is_down"] else "stop"
    except agent_lease.DAMAGE:
        pass  # the watcher must survive a damaged file
    return ""


def power_off(reason: str) -> None:
    """Power off as ~/.broker/node.json says: "file" (a simulated machine reads the reason) or a shutdown command.

    Lease and autostop stay until that has worked, so that a failed shutdown is retried. A full disk prevents none.
    """
    how = (files.read_json(files.STATE / "node.json") or {}).get("power_off", "file")
    try:
        files.write_text(files.STATE / "shutdown", reason)
    except OSError:
        if how == "file":
            raise
    if how != "file" and run_command([str(word) for word in how]):
        return
    rule = files.STATE / "autostop.json"
    if reason in ("autostop", "stop") and rule.exists():
        rule.unlink()


def run_command(words: list[str]) -> int:
    """Return a command's exit code. Raises OSError, or subprocess.TimeoutExpired after a minute."""
    import subprocess

    return subprocess.run(words, check=False, timeout=COMMAND_S).returncode


def call(module: str, function: str, request: dict[str, Any]) -> dict[str, Any]:
    """Call a function of a module that is imported for this request alone."""
    answer: dict[str, Any] = getattr(__import__(module), function)(request)
    return answer


VERBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "submit": submit,
    "access": partial(call, "agent_access", "receive"),
    "exchange": partial(call, "agent_exchange", "exchange"),
    "peers": partial(call, "agent_group", "receive"),
    "head": agent_head.receive,
    "status": answer_status,
    "cancel": cancel,
    "lease": renew_lease,
    "autostop": set_autostop,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
