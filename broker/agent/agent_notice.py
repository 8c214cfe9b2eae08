"""Watch the cloud's metadata server for the preemption notice of a spot node. Standard library only.

EC2: `spot/instance-action` appears at best two minutes before the end; a rebalance recommendation may come earlier and
is only reported because most are never followed by a preemption. Compute Engine: `instance/preempted` turns TRUE thirty
seconds before. Both are plain HTTP to a link-local address, bypassing any proxy of the environment.
"""

from __future__ import annotations

import calendar
import http.client
import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.agent import agent_files as files
else:
    import agent_files as files

SERVER = "169.254.169.254"
POLL_S = 1.0  # EC2 recommends 5 s per item; polling every second has shown no cost and gains up to four seconds
ANSWER_S = 2.0
HOLD_S = 60  # how long Compute Engine holds a request until there is a change
AWS_NOTICE_S, GCP_NOTICE_S = 120.0, 30.0
TOKEN_S = 21600
TRIES_MAX = 60  # consecutive tries without an answer: there is no metadata server here


class NoValidAnswer(Exception):
    """The server did not answer, or its answer is invalid."""


def watch_notices(cloud: str) -> None:
    """Poll until a notice is recorded for the runners; return at once on clouds without notices."""
    read = READERS.get(cloud)
    failures = 0

    def note_answer() -> None:
        nonlocal failures
        failures = 0

    while read is not None and failures < TRIES_MAX:
        try:
            notice_s = read(note_answer)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, NoValidAnswer):
            notice_s = None
            failures += 1
            time.sleep(POLL_S)
        if notice_s is not None:
            record(notice_s)
            return


def record(notice_s: float) -> None:
    """Record the notice for the runners. On a full disk, try until its time is up: a program may free some."""
    left_s = max(0.0, notice_s)
    end_s = time.monotonic() + left_s
    while not files.note_json(files.STATE / "preemption", {"notice_s": left_s, "time_s": time.time()}) and left_s:
        time.sleep(POLL_S)
        left_s = max(0.0, end_s - time.monotonic())


def read_aws(note_answer: Callable[[], None]) -> float | None:
    """Poll EC2; return the seconds until the end once announced, or None when the token must be renewed.

    `note_answer` is called after each answer: a busy machine misses one now and then in the days of a run.
    """
    token = request_metadata("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)})
    if token is None:
        raise NoValidAnswer
    headers = {"X-aws-ec2-metadata-token": token}
    end_s = time.monotonic() + TOKEN_S / 2
    while time.monotonic() < end_s:
        text = request_metadata("GET", "/latest/meta-data/spot/instance-action", headers)
        note_answer()
        if text is not None:
            left_s = parse_time_s(json.loads(text)["time"]) - time.time()
            return left_s if 0 < left_s <= AWS_NOTICE_S else AWS_NOTICE_S  # otherwise, this machine's clock is wrong
        advice = request_metadata("GET", "/latest/meta-data/events/recommendations/rebalance", headers)
        if advice is not None and not (files.STATE / "rebalance").exists():
            files.note_json(files.STATE / "rebalance", {"time_s": parse_time_s(json.loads(advice)["noticeTime"])})
        time.sleep(POLL_S)
    return None


def read_gcp(note_answer: Callable[[], None]) -> float | None:
    """Wait for Compute Engine's answer, which arrives on a change or after HOLD_S."""
    path = f"/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec={HOLD_S}"
    flavor = {"Metadata-Flavor": "Google"}
    # A change before the request would not be reported as one, so read the current value first.
    for target in ("/computeMetadata/v1/instance/preempted", path):
        text = request_metadata("GET", target, flavor, answer_s=HOLD_S + ANSWER_S)
        if text is None:
            raise NoValidAnswer
        note_answer()
        if text.strip() == "TRUE":
            return GCP_NOTICE_S
    return None


def request_metadata(verb: str, path: str, headers: dict[str, str], *, answer_s: float = ANSWER_S) -> str | None:
    """Return the body, or None on 404. Raises OSError, HTTPException or NoValidAnswer."""
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
        raise NoValidAnswer
    return text


def parse_time_s(text: str) -> float:
    """Parse a UTC time such as 2026-01-31T12:00:00Z to seconds since the epoch."""
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))


READERS = {"aws": read_aws, "gcp": read_gcp}
