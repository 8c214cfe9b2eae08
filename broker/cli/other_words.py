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
_MACHINES = "the cluster's machines are used as they are; start others with `broker launch`"
FLAGS = {
    "--async": "use `-d`",
    "--clone-disk-from": "store the data in a bucket with `file_mounts`",
    "--cloud": "use `--infra CLOUD`",
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
    "autostop": {"--all": _EVERY_NAME, "-a": _EVERY_NAME},
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
    "jobs cancel": dict.fromkeys(("--name", "-n"), "write the name alone: `broker jobs cancel NAME`"),
    "jobs launch": {
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
    "jobs queue": dict.fromkeys(("--refresh", "-r"), "omit it, or use `--watch`"),
    "logs": {"--status": "use `broker queue CLUSTER`", "-s": _SAVE},
    "queue": dict.fromkeys(("--output", "-o"), "use `--json`"),
    "serve logs": {"-s": _SAVE},
    "serve status": {"--endpoint": "use `--json`"},
    "start": {
        "--all": _EVERY_NAME,
        "-a": _EVERY_NAME,
        **dict.fromkeys(("--down", "--idle-minutes-to-autostop", "-i"), _AFTERWARDS),
    },
    "status": dict.fromkeys(("--output", "-o"), "use `--json`"),
    "stop": {"--all": _EVERY_NAME, "-a": _EVERY_NAME},
}  # fmt: skip
