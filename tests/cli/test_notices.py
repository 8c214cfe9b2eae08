"""Notices on the command line: shown with a plan, refused by a launch; and the schema for editors."""

from __future__ import annotations

import json
from typing import Any

SERVED = "resources: {cpus: 2+, infra: local}\nservice: {readiness_probe: /health, replicas: 2}\nrun: echo hello\n"


def test_plan_continues_with_notes_on_unsupported_fields(shell: Any) -> None:
    path = shell.write("serve.yaml", SERVED)
    done = shell.run("plan", path)
    assert "Choice:" in done.stdout
    assert done.stderr.splitlines() == [
        f"note: {path}:2:1: `service`: a service is neither a cluster nor a managed job; the plan is for one replica "
        "(serve it with `broker serve up`, or remove `service` to run one replica as a cluster)"
    ]
    assert json.loads(shell.run("plan", path, "--json").stdout)


def test_launch_refuses_with_the_place_before_anything_starts(shell: Any) -> None:
    path = shell.write("serve.yaml", SERVED)
    for command in (["launch", path, "-y"], ["jobs", "launch", path, "-y"]):
        done = shell.run(*command, code=2)
        assert f"error: {path}:2:1: `service`: a service is neither a cluster nor a managed job; " in done.stderr
        assert "    2 | service:" in done.stderr
        assert "hint: serve it with `broker serve up`" in done.stderr
    assert shell.read_json("status")["clusters"] == []


def test_missing_value_stops_a_launch_but_no_plan(shell: Any) -> None:
    path = shell.write("token.yaml", "resources: {cpus: 1+, infra: local}\nenvs: {TOKEN: }\nrun: echo $TOKEN\n")
    assert "pass `--env TOKEN=...`" in shell.run("plan", path).stderr
    assert "has no value" in shell.run("launch", path, "-y", code=2).stderr
    assert "note:" not in shell.run("plan", path, "--env", "TOKEN=a").stderr


MACHINE = "{disk_tier: best, ports: 8080, labels: {team: vision}, image_id: ami-0123, cpus: 2+, memory: 8+, infra: %s}"


def test_field_is_noted_only_if_the_chosen_cloud_does_not_support_it(shell: Any) -> None:
    path = shell.write("image.yaml", f"resources: {MACHINE % 'aws/us-east-1'}\nrun: echo hello\n")
    assert "image.yaml" not in shell.run("plan", path).stderr
    assert "image.yaml" not in shell.run("launch", path, "--dryrun").stderr
    path = shell.write("image.yaml", f"resources: {MACHINE % 'local'}\nrun: echo hello\n")
    fields = [line.split("`")[1] for line in shell.run("plan", path).stderr.splitlines() if "on local" in line]
    assert fields == ["disk_tier", "ports", "labels", "image_id"]
    for command in (["launch", path, "-y"], ["jobs", "launch", path, "-y"]):
        done = shell.run(*command, code=2)
        assert "`image_id` on local: machine images are not supported" in done.stderr
        assert "hint: remove `image_id`" in done.stderr
    assert shell.read_json("status")["clusters"] == []


def test_schema_is_json_and_can_go_to_a_file(shell: Any) -> None:
    schema = json.loads(shell.run("schema").stdout)
    assert "accelerators" in schema["$defs"]["resources"]["properties"]
    done = shell.run("schema", "-o", "task.schema.json")
    assert "$schema=task.schema.json" in done.stderr
    assert json.loads((shell.folder / "task.schema.json").read_text()) == schema
    assert "cannot write" in shell.run("schema", "-o", "no/such/folder/x.json", code=2).stderr
