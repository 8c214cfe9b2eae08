"""The table of commands: read by the door, by help and by shell completion, which import no command for it."""

from __future__ import annotations

# name -> (module, one line of help). A module of one command has a function of its name; a group has `app`.
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("broker.cli.plan", "Rank where a task could run, with costs; starts nothing"),
    "advise": ("broker.cli.advise", "Say how to train a model: GPUs, strategy, days and dollars"),
    "launch": ("broker.cli.launch", "Bring a cluster up and run a task on it"),
    "exec": ("broker.cli.launch", "Run a task on a cluster that is up"),
    "status": ("broker.cli.clusters", "Show clusters, managed jobs and what they have cost"),
    "logs": ("broker.cli.clusters", "Show what a run prints"),
    "queue": ("broker.cli.clusters", "List the runs of a cluster"),
    "cancel": ("broker.cli.clusters", "End runs of a cluster"),
    "stop": ("broker.cli.lifecycle", "Stop a cluster's machines and keep their disks"),
    "start": ("broker.cli.lifecycle", "Start a stopped cluster again"),
    "down": ("broker.cli.lifecycle", "Take clusters down for good"),
    "autostop": ("broker.cli.lifecycle", "Stop a cluster by itself when it is idle"),
    "ssh": ("broker.cli.lifecycle", "Open a shell on a node"),
    "jobs": ("broker.cli.jobs", "Managed jobs: they survive preemption and your terminal"),
    "rehearse": ("broker.cli.rehearse", "Run a task here as a spot job, with a preemption, and see it recover"),
    "cost": ("broker.cli.cost", "Show what was spent, by job, cloud or day"),
    "simulate": ("broker.cli.simulate", "Replay a task over recorded spot markets, policy by policy"),
    "traces": ("broker.cli.traces", "Record spot markets, and say what recordings hold"),
    "state": ("broker.cli.state", "The state file: its condition, copies, restore and reset"),
    "gc": ("broker.cli.gc", "End machines that nobody needs"),
    "gpus": ("broker.cli.gpus", "List accelerators with their cheapest prices"),
    "prices": ("broker.cli.prices", "Show what one instance type costs everywhere"),
    "history": ("broker.cli.prices", "Show how the prices of an instance type moved"),
    "catalog": ("broker.cli.catalog", "The price book: its age, its refresh, other catalogs"),
    "check": ("broker.cli.check", "Say which clouds can be used and how to enable the others"),
    "schema": ("broker.cli.schema", "Print the JSON Schema of task files, for editors"),
    "local": ("broker.cli.local", "The pretend cloud on this machine"),
}
HIDDEN: dict[str, tuple[str, str]] = {"daemon": ("broker.cli.daemon", "Drive the managed jobs of a state folder")}
GROUPS = ("jobs", "local", "catalog", "traces", "state")
