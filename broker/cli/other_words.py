"""Commands and flags of SkyPilot, Slurm and kubectl that broker calls differently: the hint for those who type them."""

from __future__ import annotations

_POOLS = "worker pools are not supported; launch one managed job per worker"
# A command, or a command and its first argument.
COMMANDS = {
    "api": "use `broker server`, `broker login` and `broker logout`",
    "apply": "use `broker launch` or `broker jobs launch`",
    "cost-report": "use `broker cost`",
    "debug-dump": "repeat the failed command with `--debug`",
    "delete": "use `broker down`",
    "get": "use `broker status`",
    "gpus label": "broker reads the labels of Kubernetes' nodes; it sets none",
    "gpus list": "use `broker gpus`",
    "jobs dashboard": "use `broker dashboard`",
    "jobs pool": _POOLS,
    "jobs status": "use `broker jobs queue`, or `broker jobs why JOB`",
    "local down": "the local cloud is always there; terminate its clusters with `broker down`",
    "local up": "the local cloud is always there: use `--infra local`",
    "ps": "use `broker status`",
    "run": "use `broker launch`, or `broker jobs launch` for a managed job",
    "sbatch": "use `broker jobs import`, then `broker jobs launch`",
    "show-gpus": "use `broker gpus`",
    "spot": "use `broker jobs`",
    "squeue": "use `broker status` or `broker jobs queue`",
    "status-kubernetes": "use `broker status`",
    "storage": "write buckets to `file_mounts` in the task; broker never deletes a bucket",
    "submit": "use `broker jobs launch`",
    "ui": "use `broker dashboard`",
    "up": "use `broker launch`, or `broker serve up` for a service",
    "volume": "volumes are not supported; write buckets to `file_mounts` in the task",
    "volumes": "volumes are not supported; write buckets to `file_mounts` in the task",
    "workspace": "workspaces are not supported; use one `BROKER_HOME` for each",
}
_IN_TASK = "write `{}` under `resources` in the task"
_REPOSITORY = "write `workdir: {url: URL, ref: REF}` in the task"
_EVERY_NAME = "name each cluster; `broker status` lists them"
_AFTERWARDS = "use `broker autostop CLUSTER` afterwards"
_CUT = "use `--no-follow`, and `tail` of your shell"
_SAVE = "redirect the output to a file"
_JSON = "use `--json`"
_WHOLE = "omit it: the command waits for the result; to wait in the background, add `&` in your shell"
_ACTIVITY = "omit it: only runs count as activity, not SSH sessions"
_UPLOADS = "omit it: pending uploads to mounted buckets are waited for unless `--now` is given"
_SELECT = "use `--json`, and select with `jq`"
_QUEUE = "use `broker jobs queue`"
_SERVICES = "use `broker serve status`"
_ADDRESSES = "use `broker status CLUSTER --json`"
_HOOKS = "hooks are not supported; write such commands at the end of `run`"
_MACHINES = "the cluster's machines are used as they are; start others with `broker launch`"
FLAGS = {
    "--async": "use `-d`",
    "--clone": "store the data in a bucket with `file_mounts`",
    "--clone-disk-from": "store the data in a bucket with `file_mounts`",
    "--cloud": "use `--infra CLOUD`",
    "--config": "write SkyPilot's settings under `config` in the task, and those of broker in `config.toml`",
    "--detach-setup": "use `-d`",
    "--disk-size": _IN_TASK.format("disk_size"),
    "--disk-tier": _IN_TASK.format("disk_tier"),
    "--fast": "use `broker exec`, which skips `setup`",
    "--git-ref": _REPOSITORY,
    "--git-url": _REPOSITORY,
    "--image-id": _IN_TASK.format("image_id"),
    "--job-recovery": _IN_TASK.format("job_recovery"),
    "--local-disk": _IN_TASK.format("local_disk"),
    "--network-tier": _IN_TASK.format("network_tier"),
    "--no-async": "omit it: the command waits unless `-d` is given",
    "--no-setup": "use `broker exec`, which skips `setup`",
    "--pool": _POOLS,
    "--ports": _IN_TASK.format("ports"),
    "--priority": _IN_TASK.format("priority"),
    "--purge": "use `broker gc`, which terminates machines that no cluster uses",
    "--region": "use `--infra CLOUD/REGION`",
    "--secret-file": "use `--secret KEY`, which takes the value from this shell",
    "--sync-down": _SAVE,
    "--tail": _CUT,
    "--workspace": "workspaces are not supported; use one `BROKER_HOME` for each",
    "--zone": "use `--infra CLOUD/REGION/ZONE`",
}
# Flags that need another hint with some commands.
FLAGS_OF = {
    "autostop": {
        **dict.fromkeys(("--all", "-a", "--all-users", "-u"), _EVERY_NAME),
        "--async": _WHOLE,
        "--wait-for": _ACTIVITY,
    },
    "cancel": {
        **dict.fromkeys(("--all-users", "-u"), "use `--all`, which cancels the runs of all users on the cluster"),
        "--async": _WHOLE,
    },
    "check": {
        **dict.fromkeys(("--verbose", "-v"), "name one cloud: `broker check CLOUD`"),
        **dict.fromkeys(("--output", "-o"), _JSON),
        "-w": "workspaces are not supported; use one `BROKER_HOME` for each",
    },
    "down": {
        **dict.fromkeys(("--all-users", "-u"), "use `--all`"),
        **dict.fromkeys(("--graceful", "--graceful-timeout"), _UPLOADS),
        "--async": _WHOLE,
        "-p": "use `broker gc`, which terminates machines that no cluster uses",
    },
    "exec": {
        **dict.fromkeys(("--cluster", "-c"), "write the cluster first: `broker exec CLUSTER TASK.yaml`"),
        **dict.fromkeys(
            ("--cloud", "--cpus", "--disk-size", "--disk-tier", "--image-id", "--infra", "--instance-type", "--memory",
             "--network-tier", "--no-use-spot", "--num-nodes", "--ports", "--region", "--use-spot", "--zone", "-t"),
            _MACHINES,
        ),
    },
    "gpus": {
        **dict.fromkeys(("--infra", "--region"), "use `--cloud CLOUD --all-regions`"),
        **dict.fromkeys(("--all", "-a"), "omit it: `broker gpus` lists every accelerator"),
        **dict.fromkeys(("--output", "-o"), "use `--json`"),
    },
    "jobs cancel": {
        **dict.fromkeys(("--name", "-n"), "write the name alone: `broker jobs cancel NAME`"),
        **dict.fromkeys(("--all-users", "-u"), "use `--all`"),
        **dict.fromkeys(("--pool", "-p"), _POOLS),
    },
    "jobs launch": {
        "-w": "workspaces are not supported; use one `BROKER_HOME` for each",
        **dict.fromkeys(("--cluster", "-c"), "use `--name`"),
        "-p": _POOLS,
        "--depends-on": "write the tasks in one file, each with `needs`",
        "--job-group": "write `execution: parallel` in a header: a first document of the file",
        "--num-jobs": "use `broker map` or `broker sweep`",
    },
    "jobs logs": {
        **dict.fromkeys(("--name", "-n"), "write the name alone: `broker jobs logs NAME`"),
        "--controller": "use `broker jobs why JOB` or `broker jobs events JOB`",
        "-s": _SAVE,
    },
    "jobs queue": {
        **dict.fromkeys(("--refresh", "-r"), "omit it, or use `--watch`"),
        **dict.fromkeys(("--verbose", "-v"), _JSON),
        **dict.fromkeys(
            ("--after", "--before", "--infra", "--limit", "--since", "--skip-finished", "--status", "-l", "-s"), _SELECT
        ),
    },
    "launch": {
        "--resize": "a cluster keeps its machines: use `broker down`, then launch again",
        "--wait-for": _ACTIVITY,
        "-w": "workspaces are not supported; use one `BROKER_HOME` for each",
    },
    "logs": {
        **dict.fromkeys(("--autostop", "--hook"), _HOOKS),
        **dict.fromkeys(("--worker", "-w"), "omit it: the output of every node is shown"),
        "--provision": "repeat the launch with `--debug`",
        "--status": "use `broker queue CLUSTER`",
        "-s": _SAVE,
    },
    "queue": {
        **dict.fromkeys(("--output", "-o"), _JSON),
        **dict.fromkeys(("--all-users", "-u"), "omit it: the runs of all users are listed"),
        **dict.fromkeys(("--skip-finished", "-s"), _SELECT),
    },
    "serve down": {
        "--replica-id": "replicas that fail are replaced; change their number with `broker serve update`",
        "--async": _WHOLE,
        "-p": "use `broker gc`, which terminates machines that no cluster uses",
    },
    "serve logs": {
        **dict.fromkeys(("--controller", "--load-balancer"), "use `broker serve why SERVICE`"),
        "-s": _SAVE,
    },
    "serve up": {"--async": "omit it: the command waits only with `--wait`", "--no-async": "use `--wait`"},
    "serve status": {"--endpoint": _JSON, **dict.fromkeys(("--verbose", "-v"), _JSON)},
    "start": {
        "--all": _EVERY_NAME,
        "-a": _EVERY_NAME,
        **dict.fromkeys(("--down", "--idle-minutes-to-autostop", "-i"), _AFTERWARDS),
        **dict.fromkeys(("--retry-until-up", "-r"), "repeat the command until the machines are available"),
        "--async": _WHOLE,
        "--wait-for": _ACTIVITY,
    },
    "status": {
        **dict.fromkeys(("--output", "-o", "--verbose", "-v"), _JSON),
        **dict.fromkeys(("--ip", "--endpoint", "--endpoints"), _ADDRESSES),
        **dict.fromkeys(("--show-managed-jobs", "--no-show-managed-jobs"), _QUEUE),
        **dict.fromkeys(("--show-services", "--no-show-services"), _SERVICES),
        **dict.fromkeys(("--show-pools", "--no-show-pools"), _POOLS),
    },
    "stop": {**dict.fromkeys(("--all", "-a", "--all-users", "-u"), _EVERY_NAME), "--async": _WHOLE},
}  # fmt: skip
# Of commands whose arguments differ, shown if one is missing or too many are given.
ARGUMENTS_OF = {
    "check": "name one cloud, or none to check all",
    "jobs logs": "name one job; `broker jobs queue` lists them, and a pipeline's tasks are jobs of their own",
    "logs": "name one cluster, and one run if it is not the newest; `broker queue CLUSTER` lists them",
    "queue": "name one cluster; `broker status` lists them",
    "serve logs": "name one service, and one replica at most; `broker serve status` lists them",
}
