"""`broker serve keys`: a key is printed once, listed without its secret, and revoked by name."""

from __future__ import annotations

import pytest

from broker.types import ReadinessProbe, Resources, ServiceSpec, Task
from tests.cli.conftest import Shell


@pytest.mark.long
def test_key_is_shown_once_and_revoked_by_name(shell: Shell) -> None:
    task = Task(run="x", resources=(Resources(cloud="local"),), service=ServiceSpec(probe=ReadinessProbe(path="/")))
    shell.home.mkdir(mode=0o700)
    with shell.open_store() as store:
        store.services.add("web", task, host="127.0.0.1", port=1, wanted=0)
        store.services.request_down("web")  # no daemon starts anything for it
    made = shell.run(
        "serve", "keys", "create", "web", "--name", "ann", "--tokens-per-minute", "100", "--expires", "30d"
    )
    with shell.open_store() as store:
        assert store.services.has_keys(store.services.list()[0]), "no controller without the key may open the service"
    text = made.stdout.strip()
    assert text.startswith("broker-") and "not shown again" in made.stderr
    listed = shell.run("serve", "keys", "list", "web")
    assert "ann" in listed.stdout and "ACTIVE" in listed.stdout and text not in listed.stdout
    assert max(map(len, listed.stdout.splitlines())) <= 80
    assert text.split("-")[2] not in shell.run("serve", "keys", "list", "web", "--json").stdout
    assert "exists" in shell.run("serve", "keys", "create", "web", "--name", "ann", code=2).stderr
    shell.run("serve", "keys", "revoke", "web", "ann")
    assert "REVOKED" in shell.run("serve", "keys", "list", "web").stdout
    assert "unknown key" in shell.run("serve", "keys", "revoke", "web", "bob", code=2).stderr
    assert "`--expires` must be" in shell.run("serve", "keys", "create", "web", "--expires", "x", code=2).stderr
