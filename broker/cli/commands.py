"""The table of commands. The parser, `--help` and shell completion read it without importing a command."""

from __future__ import annotations

# name -> (module, one line of help). A module of one command has a function of that name; a group has `app`.
# A command's own page shows its docstring, which begins with the same sentence.
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("broker.cli.plan", "Rank placements for a task by cost, without starting anything."),
    "advise": ("broker.cli.advise", "Recommend GPUs and parallelism for a model, with time and cost."),
    "simulate": ("broker.cli.simulate", "Compare spot policies for a task on recorded markets."),
    "schema": ("broker.cli.schema", "Print the JSON Schema of task files, for editors."),
    "launch": ("broker.cli.launch", "Start a cluster and run a task on it."),
    "exec": ("broker.cli.launch", "Run a task on a running cluster."),
    "status": ("broker.cli.clusters", "Show clusters, managed jobs and their cost."),
    "logs": ("broker.cli.clusters", "Print the output of a run."),
    "queue": ("broker.cli.clusters", "List the runs of a cluster."),
    "cancel": ("broker.cli.clusters", "Cancel runs on a cluster."),
    "ssh": ("broker.cli.lifecycle", "Open a shell on a node, or run a command there."),
    "stop": ("broker.cli.lifecycle", "Stop clusters and keep their disks."),
    "start": ("broker.cli.lifecycle", "Restart stopped clusters."),
    "autostop": ("broker.cli.lifecycle", "Stop clusters automatically when they are idle."),
    "down": ("broker.cli.lifecycle", "Terminate clusters and delete their disks."),
    "jobs": ("broker.cli.jobs", "Run managed jobs, which recover from preemptions."),
    "serve": ("broker.cli.serve", "Serve a task with replicas behind a load balancer."),
    "map": ("broker.cli.map", "Run a program over a file of items on spot workers."),
    "sweep": ("broker.cli.sweep", "Search hyperparameters with managed jobs."),
    "gpus": ("broker.cli.gpus", "List accelerators with their lowest prices."),
    "prices": ("broker.cli.prices", "Show the price of an instance type in every location."),
    "history": ("broker.cli.prices", "Show how the prices of an instance type changed."),
    "locations": (
        "broker.cli.locations",
        "Show preemptions, refusals and prices of the locations where jobs ran on spot.",
    ),
    "catalog": ("broker.cli.catalog", "Inspect, update, import or reset the price catalog."),
    "traces": ("broker.cli.traces", "Record spot availability and describe recordings."),
    "top": ("broker.cli.dashboard", "Show spending, jobs and clusters, refreshed every two seconds."),
    "dashboard": ("broker.cli.dashboard", "Show jobs, clusters and cost in a browser."),
    "check": ("broker.cli.check", "Check which clouds are usable and how to enable the others."),
    "cost": ("broker.cli.cost", "Show spending by job, cloud, day, user or project."),
    "report": (
        "broker.cli.report",
        "Report a month's spending, savings against on-demand and losses to preemptions.",
    ),
    "forecast": ("broker.cli.forecast_score", "Compare forecasts with the outcomes of ended jobs."),
    "gc": ("broker.cli.gc", "Terminate orphaned cloud resources."),
    "state": ("broker.cli.state", "Inspect, back up, restore or reset the state file."),
    "server": ("broker.cli.server", "Share one installation among several users."),
    "login": ("broker.cli.login", "Log in to a server; commands then run there."),
    "logout": ("broker.cli.login", "Log out of the server; commands then run on this machine."),
    "rehearse": ("broker.cli.rehearse", "Run a spot job or service on this machine, with preemptions."),
    "local": ("broker.cli.local", "Control the local simulated cloud."),
}
# The sections of `broker --help`, in order.
PANELS: dict[str, tuple[str, ...]] = {
    "Plan": ("plan", "advise", "simulate", "schema"),
    "Clusters": (
        "launch", "exec", "status", "logs", "queue", "cancel", "ssh", "stop", "start", "autostop", "down",
    ),
    "Jobs": ("jobs", "map", "sweep", "serve"),
    "Markets": ("gpus", "prices", "history", "locations", "catalog", "traces"),
    "Overview": ("top", "dashboard"),
    "Account": ("check", "cost", "report", "forecast", "gc", "state"),
    "Server": ("server", "login", "logout"),
    "Local": ("rehearse", "local"),
}  # fmt: skip
HIDDEN: dict[str, tuple[str, str]] = {
    "daemon": ("broker.cli.daemon", "Run the managed jobs of a state folder."),
    "balancer": ("broker.cli.balancer", "Run the balancer of one service."),
    "updater": ("broker.cli.updater", "Update prices that are due, once, within a time limit."),
}
GROUPS = ("jobs", "serve", "forecast", "local", "catalog", "traces", "state", "server")
# Commands that read prices, with the subcommand if only one of a group does. After these commands, outdated prices are
# updated in the background.
PRICED = ("plan", "advise", "launch", "jobs launch", "gpus", "prices", "cost")
# Commands that work on this machine's state folder: after `broker login`, they would not show the server's state.
EMBEDDED = ("gc", "state")
