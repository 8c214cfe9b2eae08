"""`make audit`: bandit over broker and trainers, and pip-audit over what is installed.

Each finding of bandit is in `ACCEPTED` with its reason, or fails; so does a reason whose finding is gone. pip-audit
fails on a known vulnerability. Where its service cannot be reached, or knows none of the packages, that is reported and
passes: a machine without network must be able to build.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

# Rules of bandit that say nothing about this code, each with why.
TURNED_OFF = {
    "B101": "asserts state promises between our own functions; nothing that comes from outside is checked by one",
    "B404": "importing subprocess is no fault by itself; calls are looked at",
    "B603": "no call goes through a shell (ruff's S602 holds that), and arguments are lists",
    "B606": "replacing this process by another, with a list of arguments, is what `broker ssh` and the launcher do",
    "B607": "ssh, docker and the like are found by PATH, as users set it",
    "B311": "random numbers spread retries and make up markets; keys and ids come from `secrets` and `os.urandom`",
}
_SQL = "the text is made of constants of ours; every value is bound"
_HTTPS = "the URL is a constant or was checked to be https, or is a cloud's metadata service"
_NAMES = "the name of a variable, tag or field, not its value"
# (rule, file) -> how many findings are accepted there at most, and why.
ACCEPTED: Mapping[tuple[str, str], tuple[int, str]] = {
    ("B608", "broker/app/backup_files.py"): (2, _SQL),
    ("B608", "broker/catalog/book.py"): (5, _SQL),
    ("B608", "broker/catalog/history.py"): (1, _SQL),
    ("B608", "broker/catalog/suggestions.py"): (3, _SQL),
    ("B608", "broker/hosting/host_program.py"): (1, _SQL),
    ("B608", "broker/hosting/importing.py"): (1, _SQL),
    ("B608", "broker/state/base.py"): (1, _SQL),
    ("B608", "broker/state/claims.py"): (8, _SQL),
    ("B608", "broker/state/clusters.py"): (10, _SQL),
    ("B608", "broker/state/events.py"): (11, _SQL),
    ("B608", "broker/state/forecasts.py"): (1, _SQL),
    ("B608", "broker/state/history.py"): (3, _SQL),
    ("B608", "broker/state/jobs.py"): (9, _SQL),
    ("B608", "broker/state/meta.py"): (2, _SQL),
    ("B608", "broker/state/names.py"): (1, _SQL),
    ("B608", "broker/state/people.py"): (1, _SQL),
    ("B608", "broker/state/postgres.py"): (1, _SQL),
    ("B608", "broker/state/queue.py"): (2, _SQL),
    ("B608", "broker/state/refusals.py"): (4, _SQL),
    ("B608", "broker/state/retention.py"): (6, _SQL),
    ("B608", "broker/state/schedules.py"): (6, _SQL),
    ("B608", "broker/state/services.py"): (4, _SQL),
    ("B608", "broker/state/transfer.py"): (
        4,
        "names of tables are ours; those of columns are checked to be identifiers",
    ),
    ("B112", "broker/agent/agent_delivery.py"): (
        1,
        "a node keeps trying to save its log; the next round is the retry",
    ),
    ("B112", "broker/agent/agent_samples.py"): (
        1,
        "a sample that fails must not end the sampling; the next one may succeed",
    ),
    ("B310", "broker/catalog/http_client.py"): (1, _HTTPS),
    ("B310", "broker/clouds/aws/network.py"): (1, _HTTPS),
    ("B310", "broker/clouds/gcp/callers.py"): (1, _HTTPS),
    ("B310", "broker/agent/agent_bucket.py"): (2, _HTTPS),
    ("B310", "broker/storage/node_objects.py"): (1, _HTTPS),
    ("B310", "broker/storage/s3.py"): (1, _HTTPS),
    ("B310", "trainers/buckets.py"): (1, _HTTPS),
    ("B310", "trainers/node_uv.py"): (1, "an index that the node's user names; what it gives counts by its checksum"),
    ("B105", "broker/access/azure.py"): (1, "a hint that names a field"),
    ("B105", "broker/clouds/aws/tags.py"): (1, _NAMES),
    ("B105", "broker/clouds/tape.py"): (1, "the form of a placeholder"),
    ("B105", "broker/agent/agent_login.py"): (4, _NAMES),
    ("B105", "broker/storage/node_objects.py"): (2, _NAMES),
    ("B105", "trainers/hugging_face.py"): (1, "the id of a token of text"),
    ("B106", "broker/clouds/gcp/startable.py"): (1, "the token of a request that is never sent"),
    ("B105", "trainers/wire.py"): (1, _NAMES),
    ("B614", "trainers/extra_state.py"): (
        1,
        "objects of the run's own checkpoint, which torch.distributed.checkpoint unpickles as well",
    ),
    ("B104", "broker/agent/agent_link.py"): (1, "compared with, to warn; the peer must authenticate all the same"),
    ("B104", "broker/hosting/machines.py"): (2, "a server for other machines: TLS, and every request needs a token"),
    ("B104", "broker/serve/gateway_task.py"): (1, "a balancer for clients elsewhere: it admits API keys only"),
    ("B202", "broker/hosting/host_program.py"): (1, "the wheel that broker packed and sent, after its checksum"),
    ("B104", "trainers/serve.py"): (
        1,
        "a replica on a node of its own, whose cloud's firewall admits the service's port",
    ),
    ("B105", "broker/serve/journal.py"): (1, _NAMES),
    ("B105", "broker/server/proxy.py"): (1, _NAMES),
    ("B104", "trainers/launch.py"): (1, "compared with, to warn; the peer must authenticate all the same"),
    ("B108", "broker/clouds/local.py"): (1, "the folder below it must be ours with mode 0700, or is refused"),
    ("B108", "broker/clouds/ssh/cloud.py"): (
        1,
        "a lock that every user of a host may hold and only its owner may write",
    ),
    ("B108", "broker/clouds/ssh/host_program.py"): (1, "as in clouds/local.py: ours with mode 0700, or refused"),
    ("B108", "broker/sites/openssh.py"): (1, "as in clouds/local.py: ours with mode 0700, or refused"),
    ("B108", "broker/clouds/kubernetes/manifest.py"): (1, "the shared memory of a container, not of this machine"),
    ("B108", "broker/sites/kubernetes.py"): (1, "as in sites/slurm.py"),
    ("B108", "broker/sites/slurm.py"): (1, "a default; the node's program makes the folder as clouds/local.py does"),
    ("B103", "broker/clouds/local_machine.py"): (1, "the lock of a host, which all its users open; it has no content"),
    ("B605", "broker/clouds/local_machine.py"): (1, "a constant command, on systems without /proc"),
    ("B406", "broker/cli/svg.py"): (1, "escapes text that we write; no XML is read"),
}
UNREACHED = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "NameResolutionError", "ServiceError", "HTTPError")


def main() -> int:
    problems = [*check_code(run_bandit()), *check_packages(*run_pip_audit())]
    for each in problems:
        print(f"error: {each}")
    return int(bool(problems))


def run_bandit() -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "bandit",
        "-q",
        "-r",
        "broker",
        "trainers",
        "-f",
        "json",
        "-s",
        ",".join(TURNED_OFF),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert not report["errors"], report["errors"]
    results: list[dict[str, Any]] = report["results"]
    return results


def check_code(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return findings that are not accepted, and accepted ones that were not found."""
    found = Counter((each["test_id"], each["filename"]) for each in results)
    problems = []
    for key in sorted({*found, *ACCEPTED}):
        accepted = ACCEPTED.get(key, (0, ""))[0]
        if found[key] > accepted:
            lines = [each for each in results if (each["test_id"], each["filename"]) == key]
            places = ", ".join(f"{key[1]}:{each['line_number']}" for each in lines)
            problems.append(f"{key[0]} {lines[0]['issue_text']} ({places}); {accepted} of {found[key]} have a reason")
        elif not found[key]:
            problems.append(f"{key[0]} in {key[1]}: {accepted} are accepted and none is found; mend `ACCEPTED`")
    if not problems:
        print(f"bandit: {found.total()} findings, each with its reason")
    return problems


def run_pip_audit() -> tuple[str, str]:
    """Audit this environment without the project itself; return stdout and stderr."""
    command = [sys.executable, "-m", "pip_audit", "-f", "json", "--progress-spinner", "off", "--skip-editable"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def check_packages(stdout: str, stderr: str) -> list[str]:
    """Return known vulnerabilities; [] and a printed notice where the service gave no answer."""
    try:
        packages = json.loads(stdout)["dependencies"]
    except (ValueError, KeyError):
        if any(each in stderr for each in UNREACHED):
            print(f"pip-audit: skipped, its service cannot be reached: {stderr.strip().splitlines()[-1][:200]}")
            return []
        return [f"pip-audit did not work: {stderr.strip()[-500:]}"]
    known = [each for each in packages if "vulns" in each]
    if not known:
        print(f"pip-audit: skipped, its service knows none of the {len(packages)} packages")
        return []
    print(f"pip-audit: {len(known)} of {len(packages)} packages looked up")
    return [
        f"{each['name']} {each['version']}: {vulnerability['id']}, fixed in {vulnerability['fix_versions'] or 'none'}"
        for each in known
        for vulnerability in each["vulns"]
    ]


if __name__ == "__main__":
    sys.exit(main())
