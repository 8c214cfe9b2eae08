"""The agent on every node: `python3 -I -S agent.py VERB`, JSON on stdin, JSON on stdout. Standard library only.

Verbs: submit, access (agent_access.py), status, log, cancel, lease, autostop, and follow, a session that is kept open
(agent_follow.py). All state is below ~/.broker. A watcher, started with the first verb that needs one, ends the node
when its lease runs out, when it is done while its broker is away (agent_lease.py), or when it idles past its autostop.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.agent import agent_access, agent_dead_runs, agent_delivery, agent_flush, agent_lease
    from broker.agent import agent_files as files
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # `-I` leaves it out
    import agent_access
    import agent_dead_runs
    import agent_delivery
    import agent_files as files
    import agent_flush
    import agent_lease

LINGER_S = 5.0  # however short the autostop: whoever follows a run can read its last lines
WATCH_S = 0.5
POWER_OFF_S = 5.0  # until it is tried again
LOG_BYTES_MAX = 1 << 20


def main(verb: str, *arguments: str) -> None:
    os.umask(0o077)
    files.make_private(files.RUNS)
    if not verb.startswith("_"):
        files.note_heard()
    if verb == "_run":
        import agent_run  # type: ignore[import-not-found]  # beside us on the node; only the runner needs it

        agent_run.run(int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else None)
    elif verb == "_contain":
        import agent_container  # type: ignore[import-not-found]

        agent_container.main(*arguments)
    elif verb == "_watch":
        watch()
    elif verb == "follow":
        import agent_follow  # type: ignore[import-not-found]

        agent_follow.main(report_status, {"lease": renew_lease, "cancel": cancel})
    elif verb == "log":
        send_log(read_request())
    else:
        print(json.dumps(VERBS[verb](read_request())))


def read_request() -> dict[str, Any]:
    text = sys.stdin.read()
    value = json.loads(text) if text.strip() else {}
    assert isinstance(value, dict), "a request is a JSON object"
    return value


def submit(spec: dict[str, Any]) -> dict[str, Any]:
    """Start a run, once: asked again, it only answers the same again. The head's word counts for the whole gang."""
    run_id = int(spec["run_id"])
    folder = files.make_private(files.run_folder(run_id))
    lock = files.wait_lock(files.STATE / "submit.lock")
    try:
        known = files.read_json(folder / "spec.json")
        has_begun = files.is_locked(folder / "runner.lock") or (folder / "state.json").exists()
        if known is None or not has_begun:
            known = begin(folder, spec)
        if spec.get("lease_s"):
            agent_lease.renew(float(spec["lease_s"]))
        ensure_watcher()
    finally:
        os.close(lock)
    if int(known["rank"]):
        return {}
    ports = {key: known["head"][key] for key in ("coordinator_port", "master_port")}
    return {**ports, "credential": (folder / files.CREDENTIAL).read_text(encoding="ascii")}


def begin(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's runner inherits the listening socket, and every runner its lock: no moment when either is free."""
    runner_lock = files.try_lock(folder / "runner.lock")
    assert runner_lock is not None, "no runner holds it: we looked, under the submit lock"
    arguments, inherited = [str(spec["run_id"])], [runner_lock]
    head = dict(spec["head"])
    files.write_text(folder / files.CREDENTIAL, head.pop("credential"))  # a file that programs can be pointed to
    if int(spec["rank"]) == 0:
        import agent_link  # type: ignore[import-not-found]  # TLS, which no other verb needs

        listener = agent_link.listen(spec["node_ips"][0], int(spec["num_nodes"]))
        host, port = listener.getsockname()[:2]
        head.update(coordinator_port=port, master_port=pick_port(), address=agent_link.find_own(host))
        arguments.append(str(listener.fileno()))
        inherited.append(listener.fileno())
    spec = {**spec, "head": head}
    files.write_json(folder / "spec.json", {**spec, "image": remember_image(spec.get("image"))})
    start_detached("_run", arguments, inherited)
    for fd in inherited[:1]:
        os.close(fd)
    return spec


def remember_image(image: str | None) -> str | None:
    """A run that names no image is run in the one before it, as by `exec` on a cluster that was launched with one."""
    path = files.STATE / "image.json"
    if image:
        files.write_json(path, {"image": image})
        return image
    return (files.read_json(path) or {}).get("image")


def pick_port() -> int:
    """Free now, and below the ephemeral ports (Linux: 32768 up), so that no outgoing connection takes it meanwhile."""
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise OSError("no free port between 20000 and 32000")


def start_detached(verb: str, arguments: list[str], inherited: list[int]) -> None:
    """In a session of its own, with no ties to who asked."""
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
    ids = [int(request["run_id"])] if "run_id" in request else files.list_run_ids()
    known = set(files.list_run_ids())
    return {
        "runs": [{**files.describe_run(run_id), **read_asked(run_id)} for run_id in ids if run_id in known],
        "idle_s": measure_idle_s(),
        "is_advised": (files.STATE / "rebalance").exists(),  # by the cloud, to leave this node
        "lease_left_s": agent_lease.measure_left_s(),
    }


def read_asked(run_id: int) -> dict[str, str]:
    spec = files.read_json(files.run_folder(run_id) / "spec.json") or {}
    return {name: str(spec.get(name) or "") for name in ("name", "accelerators")}


def send_log(request: dict[str, Any]) -> None:
    """Raw bytes of the merged log from `offset`, at most a mebibyte at a time."""
    path = files.run_folder(int(request["run_id"])) / "log"
    if path.exists():
        with path.open("rb") as file:
            file.seek(int(request["offset"]))
            sys.stdout.buffer.write(file.read(LOG_BYTES_MAX))


def cancel(request: dict[str, Any]) -> dict[str, Any]:
    folder = files.run_folder(int(request["run_id"]))
    if folder.exists():
        (folder / "cancel").touch(mode=0o600)
    return {}


def renew_lease(request: dict[str, Any]) -> dict[str, Any]:
    agent_lease.renew(float(request["lease_s"]))
    ensure_watcher()
    return {}


def set_autostop(request: dict[str, Any]) -> dict[str, Any]:
    """`idle_minutes` null takes it back."""
    path = files.STATE / "autostop.json"
    if request.get("idle_minutes") is None:
        if path.exists():
            path.unlink()
        return {}
    rule = {"idle_minutes": float(request["idle_minutes"]), "is_down": bool(request["is_down"])}
    files.write_json(path, {**rule, "set_s": time.time(), "boot": files.read_boot()})
    ensure_watcher()
    return {}


def measure_idle_s() -> float:
    """Seconds since the last run here ended, or since the agent came; 0 while one is live."""
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
    lock = files.try_lock(files.STATE / "watch.lock")
    if lock is not None:
        start_detached("_watch", [], [lock])
        os.close(lock)


def watch() -> None:
    start_notices()
    threading.Thread(target=agent_delivery.deliver_forever, daemon=True).start()
    flush: agent_flush.Flush | None = None
    while True:
        for run_id in files.list_run_ids():
            agent_dead_runs.end_if_dead(run_id)
        agent_access.forget_used()
        reason = decide_power_off()
        if reason and reason != "lease":  # written outside a run, or by one whose runner was killed
            flush = flush or agent_flush.Flush()
            reason = "" if flush.look() == "waiting" else reason
        else:
            flush = None
        if reason:
            power_off(reason)
            time.sleep(POWER_OFF_S)
        time.sleep(WATCH_S)


def start_notices() -> None:
    """Where node.json names a cloud that gives notice, somebody listens for it."""
    cloud = (files.read_json(files.STATE / "node.json") or {}).get("notices")
    if cloud:
        import agent_notice  # type: ignore[import-not-found]

        threading.Thread(target=agent_notice.watch_notices, args=(cloud,), daemon=True).start()


def decide_power_off() -> str:
    """ "" to stay, "lease", "done" or "autostop" to end the node, "stop" to stop it with its disk kept."""
    if reason := agent_lease.find_end():
        return reason
    rule = files.read_of_this_boot(files.STATE / "autostop.json")
    if not rule:
        return ""
    try:
        idle_s = min(measure_idle_s(), time.time() - rule["set_s"])
        if idle_s >= max(rule["idle_minutes"] * 60, LINGER_S):
            return "autostop" if rule["is_down"] else "stop"
    except agent_lease.DAMAGE:
        pass  # the watcher must outlive a damaged file
    return ""


def power_off(reason: str) -> None:
    """As ~/.broker/node.json says: "file" (the pretend machine reads the reason) or a command, such as shutdown."""
    if reason in ("autostop", "stop"):
        (files.STATE / "autostop.json").unlink()
    # The lease stays, so that a machine whose shutdown failed is told again.
    how = (files.read_json(files.STATE / "node.json") or {}).get("power_off", "file")
    files.write_text(files.STATE / "shutdown", reason)
    if how != "file":
        subprocess.run([str(word) for word in how], check=False)


VERBS = {
    "submit": submit,
    "access": agent_access.receive,
    "status": report_status,
    "cancel": cancel,
    "lease": renew_lease,
    "autostop": set_autostop,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
