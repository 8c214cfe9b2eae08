"""Users that a proxy in front of the server names: only from its address, and only with its secret."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker.app.limits import LaunchSize
from broker.errors import LimitError, UsageError
from broker.server.context import Policy, ServerContext
from broker.server.proxy import SECRET_HEADER, ProxyProjects, TrustedProxy, read_projects
from broker.state.limits import Limit, LimitScope
from broker.state.people import Role
from broker.types import Estimate, Placement, Secret
from tests.server.conftest import Hosted
from tests.simulation.world import make_offer

SECRET = "correct horse battery staple"
HEADER = "X-Forwarded-User"
GROUPS = "X-Forwarded-Groups"
SETTINGS = """\
[trusted_proxy]
groups_header = "X-Forwarded-Groups"
default_project = "rest"
[trusted_proxy.projects]
"vision team" = "vision"
speech = "speech-lab"
"""


def make_proxy(*addresses: str, projects: ProxyProjects | None = None) -> TrustedProxy:
    return TrustedProxy(
        header=HEADER, addresses=addresses, secret=Secret(value=SECRET), role=Role.VIEWER,
        projects=projects or ProxyProjects(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> ProxyProjects:
    home = tmp_path_factory.mktemp("home")
    (home / "config.toml").write_text(SETTINGS)
    return read_projects(home)


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory, projects: ProxyProjects) -> Iterator[Hosted]:
    policy = Policy(has_controller=False, proxy=make_proxy("127.0.0.1", projects=projects))
    hosted = Hosted(tmp_path_factory.mktemp("server"), policy=policy)
    yield hosted
    hosted.stop()


def test_proxy_names_the_user_with_its_role(proxied: Hosted) -> None:
    headers = {HEADER: "ada@example.org", SECRET_HEADER: SECRET}
    status, answer = proxied.ask("/v1/handshake", headers=headers)
    assert status == 200 and (answer["user"], answer["role"]) == ("ada@example.org", "viewer")
    assert proxied.ask("/v1/launch", {}, headers=headers)[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {HEADER: "ada"},
        {HEADER: "ada", SECRET_HEADER: "wrong"},
        {HEADER: "ada", SECRET_HEADER: ""},
        {HEADER: "", SECRET_HEADER: SECRET},
        {HEADER: "ada, ben", SECRET_HEADER: SECRET},
        {SECRET_HEADER: SECRET},
    ],
)
def test_header_without_the_secret_is_refused(proxied: Hosted, headers: dict[str, str]) -> None:
    assert proxied.ask("/v1/handshake", headers=headers)[0] == 401


def test_token_is_still_accepted_behind_a_proxy(proxied: Hosted) -> None:
    assert proxied.ask("/v1/handshake", token=proxied.tokens["user"])[0] == 200


def test_header_means_nothing_without_a_proxy(hosted: Hosted) -> None:
    assert hosted.ask("/v1/handshake", headers={HEADER: "ada", SECRET_HEADER: SECRET})[0] == 401


def test_other_addresses_are_not_the_proxy() -> None:
    headers = {HEADER: "ada", SECRET_HEADER: SECRET}
    proxy = make_proxy("10.0.0.1")
    assert proxy.find_user("10.0.0.2", headers) is None and proxy.find_user(None, headers) is None
    for peer in ("10.0.0.1", "::ffff:10.0.0.1"):
        found = proxy.find_user(peer, headers)
        assert found is not None and found.user == "ada"


def test_contradictory_proxy_options_are_refused(tmp_path: Path) -> None:
    secret, short = tmp_path / "secret", tmp_path / "short"
    secret.write_text(SECRET + "\n")
    short.write_text("abc")

    def read(
        header: str = HEADER, addresses: tuple[str, ...] = ("10.0.0.1",), file: Path | None = secret, groups: str = ""
    ) -> object:
        return TrustedProxy.read(
            header=header, addresses=addresses, secret_file=file, role=Role.VIEWER,
            projects=ProxyProjects(groups_header=groups),
        )  # fmt: skip

    assert read() == make_proxy("10.0.0.1")
    for wrong in (
        {"header": "Authorization"}, {"header": "a b"}, {"addresses": ()}, {"addresses": ("proxy.example",)},
        {"file": None}, {"file": tmp_path / "none"}, {"file": short}, {"groups": "x-forwarded-user"},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            read(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("groups", "project"),
    [
        (None, "rest"),
        ("", "rest"),
        ("other", "rest"),
        ("speech", "speech-lab"),
        ("other, speech ,vision team", "vision"),  # the first line of the table that fits
        ("Speech", "rest"),
        ("speech-lab", "rest"),  # a group is not a project
    ],
)
def test_groups_of_the_proxy_decide_the_project(projects: ProxyProjects, groups: str | None, project: str) -> None:
    headers = {HEADER: "ada", SECRET_HEADER: SECRET} | ({} if groups is None else {GROUPS: groups})
    found = make_proxy("10.0.0.1", projects=projects).find_user("10.0.0.1", headers)
    assert found is not None and found.project == project
    plain = make_proxy("10.0.0.1").find_user("10.0.0.1", headers)
    assert plain is not None and plain.project == "", "without the table"


def test_limit_of_a_project_applies_to_users_of_the_proxy(proxied: Hosted, projects: ProxyProjects) -> None:
    proxied.context.store.limits.put(Limit(scope=LimitScope.PROJECT, name="vision", usd_month=1.0, gpus=None))
    choice = Estimate(placement=Placement(offer=make_offer("east1a"), is_spot=False, node_count=1), expected_usd=5.0)
    for groups, is_refused in (("speech", False), ("vision team", True)):
        headers = {HEADER: "ada", SECRET_HEADER: SECRET, GROUPS: groups}
        token = make_proxy("127.0.0.1", projects=projects).find_user("127.0.0.1", headers)
        context = ServerContext(proxied.home, policy=Policy(), token=token)
        try:
            if is_refused:
                with pytest.raises(LimitError, match="project vision"):
                    context.admit([choice], LaunchSize())
            else:
                context.admit([choice], LaunchSize())
        finally:
            context.settle()
            context.close()


@pytest.mark.parametrize(("lines", "status"), [(["speech"], 200), (["vision team", "speech"], 401)])
def test_several_lines_of_groups_are_refused_because_one_may_be_the_clients(
    proxied: Hosted, lines: list[str], status: int
) -> None:
    place = urlsplit(proxied.listening.url)
    connection = HTTPConnection(place.hostname or "", place.port, timeout=300)
    connection.putrequest("GET", "/v1/handshake")
    for name, value in ((HEADER, "ada"), (SECRET_HEADER, SECRET), *((GROUPS, line) for line in lines)):
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == status
    connection.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('group_header = "X-Groups"', "group_header"),
        ('groups_header = "a b"', "invalid header"),
        ('groups_header = "broker-proxy-secret"', "invalid header"),
        ('projects = {a = "b"}', "groups_header"),
        ('groups_header = "X-Groups"\nprojects = {a = "b c"}', "invalid project"),
        ('default_project = "-"', "invalid project"),
    ],
)
def test_invalid_settings_of_projects_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.toml").write_text(f"[trusted_proxy]\n{text}\n")
    with pytest.raises(UsageError, match=message) as caught:
        read_projects(tmp_path)
    assert "[trusted_proxy]" in caught.value.message
