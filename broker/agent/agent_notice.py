"""Hears from the cloud's metadata server that a spot node will be taken away. Standard library only.

EC2: `spot/instance-action` is there two minutes before the end, at best; a rebalance recommendation may come earlier
and is only passed on as news, for most of them are never followed by an end. Compute Engine: `instance/preempted` turns
TRUE thirty seconds before. Both are plain HTTP to a link-local address, past any proxy of the environment.
"""

from __future__ import annotations

import calendar
import http.client
import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.agent import agent_files as files
else:
    import agent_files as files

SERVER = "169.254.169.254"
POLL_S = 1.0  # EC2 asks not to be polled faster than each 5 s per item; a second costs it nothing and saves us four
ANSWER_S = 2.0
HOLD_S = 60  # how long Compute Engine keeps a question open until there is news
GCP_NOTICE_S = 30.0
TOKEN_S = 21600
TRIES_MAX = 60  # in a row without any answer: there is no metadata server here


class Silence(Exception):
    """The server gave no answer, or none that makes sense."""


def watch_notices(cloud: str) -> None:
    """Returns when notice was given (and written down for the runners), or where nobody will ever give one."""
    read = READERS.get(cloud)
    failures = 0
    while read is not None and failures < TRIES_MAX:
        try:
            notice_s = read()
            failures = 0
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, Silence):
            notice_s = None
            failures += 1
            time.sleep(POLL_S)
        if notice_s is not None:
            files.write_json(files.STATE / "preemption", {"notice_s": max(0.0, notice_s), "time_s": time.time()})
            return


def read_aws() -> float | None:
    """Seconds until the end, or None while none is announced; one look, then a pause."""
    token = ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)})
    if token is None:
        raise Silence
    headers = {"X-aws-ec2-metadata-token": token}
    end_s = time.monotonic() + TOKEN_S / 2
    while time.monotonic() < end_s:
        text = ask("GET", "/latest/meta-data/spot/instance-action", headers)
        if text is not None:
            return parse_time_s(json.loads(text)["time"]) - time.time()
        advice = ask("GET", "/latest/meta-data/events/recommendations/rebalance", headers)
        if advice is not None and not (files.STATE / "rebalance").exists():
            files.write_json(files.STATE / "rebalance", {"time_s": parse_time_s(json.loads(advice)["noticeTime"])})
        time.sleep(POLL_S)
    return None


def read_gcp() -> float | None:
    """The server answers when there is news, or after HOLD_S."""
    path = f"/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec={HOLD_S}"
    flavor = {"Metadata-Flavor": "Google"}
    # A change that came before the question was asked would not be one: look first.
    for each in ("/computeMetadata/v1/instance/preempted", path):
        text = ask("GET", each, flavor, answer_s=HOLD_S + ANSWER_S)
        if text is None:
            raise Silence
        if text.strip() == "TRUE":
            return GCP_NOTICE_S
    return None


def ask(verb: str, path: str, headers: dict[str, str], *, answer_s: float = ANSWER_S) -> str | None:
    """The body; None where the server says 404. Raises OSError, HTTPException or Silence."""
    connection = http.client.HTTPConnection(SERVER, timeout=answer_s)
    try:
        connection.request(verb, path, headers=headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    finally:
        connection.close()
    if response.status == 404:
        return None
    if response.status != 200:
        raise Silence
    return text


def parse_time_s(text: str) -> float:
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))


READERS = {"aws": read_aws, "gcp": read_gcp}
