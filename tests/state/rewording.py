"""Translation of sentences from schema 9 to today's wording; texts of a job's failure stay as recorded."""

from __future__ import annotations

import re

# (pattern for schema 9's sentence, today's sentence), applied in this order.
RULES: tuple[tuple[str, str], ...] = (
    (r"It needs (job \d+ \(\S+\)), which is (\w+)\.", r"It depends on \1: \2."),
    (r"and ends, as only", r"and ends because only"),
    (r"(had no record; `broker down \S+`) ends them", r"\1 terminates them"),
    (r"ran to its end\.", r"succeeded."),
    (
        r"Steps (\d+(?: of \d+)?), (\d+) lost in (\d+) recoveries that took ([^\n]+?)\.\n",
        r"Steps: \1, \2 lost. Recoveries: \3, taking \4.\n",
    ),
    (r"Recoveries: 0, taking 0\.0s\.", r"Recoveries: 0."),
    (r"USD; on-demand ([\d.]+) USD", r"USD; on-demand would have cost \1 USD"),
    (r"failed by itself: its program, or its budget", r"failed"),
    (r"could not be started at all", r"could not be started"),
    (r"found nothing for sale that fits", r"found no matching offer"),
    (r"It goes on with the checkpoints of job", r"It continues from the checkpoints of job"),
    (r"preempted: its cluster was taken down", r"the cluster was taken down"),
    (r"fell apart at step", r"gang failed at step"),
    (r"the gang fell apart \((.*?)\) at step (\d+): restarted on", r"the gang failed (\1) at step \2; restarting on"),
    (r"its unattended allowance of (.+?) ran out", r"the unattended allowance of \1 expired"),
    (r"(expired(?: after step \d+)?): restarted on new nodes", r"\1; restarting on new nodes"),
    (r"files did not arrive\b(?!;)", r"files were not uploaded"),
    (r"\bout of budget\b", r"budget exceeded"),
    (r"the state was restored, and nodes of its gang", r"the state was restored, but nodes of the gang"),
    (r"attempt (\d+): the nodes of attempt (\d+)", r"attempt \1: reuses the nodes of attempt \2"),
    (r"recovered: step (\d+)(?: came ([\d.]+ s) after the loss)", r"recovered at step \1, \2 after the loss"),
    (r"recovered: step (\d+)", r"recovered at step \1"),
    (
        r": (\d+) of (\d+) nodes are kept while it is replaced",
        r"; keeping \1 of \2 nodes while replacing the rest",
    ),
    (r" and is restarted on ", r"; restarting on "),
    (r"(no new step for [\d.]+ s at step \d+): restarted on", r"\1; restarting on"),
    (r" on used nodes: new nodes are tried", r" on reused nodes; retrying on new nodes"),
    (r"not started on (\S+), trying another: ", r"not started on \1, trying another cluster: "),
    (
        r"the nodes of attempt (\d+) are given back: new ones are asked for",
        r"releasing the nodes of attempt \1; requesting new ones",
    ),
    (r"\bgo to (.+?) in ", r"move to \1 in "),
    (r"\bstay at (.+?) in ", r"stay on \1 in "),
    (r"hold no machines", r"wait without machines"),
    (r"on-demand is ([\d.]+) USD for an hour of work", r"on-demand costs \1 USD per hour of work"),
    (r"USD for an hour of work", r"USD per hour of work"),
    (r"(-?[\d.]+) h to spare before on-demand must start", r"on-demand must start within \1 h"),
    (r"expected to the end ", r"expected cost to finish: "),
    (
        r"the deadline cannot be kept with the asked confidence any more; going on",
        r"the deadline can no longer be met with the requested confidence; continuing",
    ),
    (
        r"the cloud expects to take node (\d+) sooner than usual",
        r"the cloud reports an elevated preemption risk for node \1",
    ),
    (r"its nodes cannot be looked at: ", r"cannot list the nodes: "),
    (r"gone: going on with (\d+) of (\d+)", r"gone; continuing on \1 of \2 nodes"),
    (
        r", on a node that replaced a lost one: it is ended, another is asked for in (\d+ s)",
        r", on a replacement node: terminating it, next try in \1",
    ),
    (r"no node to replace the lost one: ", r"cannot replace the lost node: "),
    (r"the nodes' access to buckets is not renewed: ", r"cannot renew the nodes' bucket access: "),
    (r"; trying again in (\d+ s)", r"; retrying in \1"),
    (
        r"is late after (\d+ s): (?:asking for) (.+?) too, ([\d.]+ USD/h) at stake",
        r"has not responded for \1; also requesting \2, up to \3 at once",
    ),
    (
        r"gives no clear answer: (?:asking for) (.+?) too, ([\d.]+ USD/h) at stake",
        r"has given no clear answer; also requesting \1, up to \2 at once",
    ),
    (r"\basking for (\d+ x )", r"requesting \1"),
    (r"\bgoing on with (\d+ x )", r"resuming \1"),
    (r" is whole after ([\d.]+ s)", r": all nodes are running after \1"),
    (r"; asked often enough", r"; giving up"),
    (r"; asking again in ([\d.]+ s)", r"; retrying in \1"),
    (r"; looking for what it made", r"; checking whether nodes were created"),
    (
        r"(\d+ x \S+ .+? \(\w+\)) is given up: making sure that nothing runs there",
        r"giving up on \1; confirming that no node runs there",
    ),
    (r" is not needed any more and given back", r" is no longer needed; terminating it"),
    (
        r"(\d+ x \S+ [^(]+\(\w+\)) is confirmed gone after ([\d.]+ s), it cost ([\d.]+ USD)",
        r"terminated \1 in \2 (cost \3)",
    ),
    (r"no place outside (.*) is left to ask: waiting for", r"no location outside \1 remains to be tried; waiting for"),
    (r"(\S+) had no record and was ended", r"terminated \1, which had no record"),
)
KEPT = re.compile(r"; keeping \d+ of \d+ nodes while replacing the rest$")  # part of the event, not of the outcome


def reword(text: str) -> str:
    """Return a text of schema 9 in today's wording."""
    for old, new in RULES:
        text = re.sub(old, new, text)
    return text
