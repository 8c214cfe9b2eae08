"""Check that the result of a task's `setup` can be used on another node."""

from __future__ import annotations

import re

from broker.task.reading import Reader
from broker.task.tables import Section

# Variables whose values belong to one node, attempt or job: an archive would copy them to others.
OWN_VARIABLES = re.compile(
    r"\b(?:SKYPILOT_(?:(?:SETUP_)?NODE_(?:RANK|IPS)|TASK_IDS?|(?:MANAGED_|INTERNAL_)JOB_ID|JOB_RANK|CLUSTER_INFO)"
    r"|BROKER_(?:JOB_ID|ATTEMPT|MASTER_PORT|CHECKPOINT_DIR|PIPELINE_DIR"
    r"|PROGRESS_FILE|PREEMPTION_FILE|GANG_PEM|GANG_FILE|ACCESS_DIR))\b"
)


def check_cached_setup(reader: Reader, section: Section) -> None:
    """Report a variable in `setup` whose value differs at each start, if `setup` is to be cached."""
    text = section.get("setup") or ""
    if found := OWN_VARIABLES.search(text):
        message = f"`setup` with `cache_setup` must not use `{found[0]}`, which differs between nodes or starts"
        reader.fault(section.marks["setup"], message, "use it in `run`, or remove `cache_setup`")
