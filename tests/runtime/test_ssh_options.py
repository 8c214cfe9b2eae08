"""The options of `ssh`: nothing is taken on trust, and the sockets of kept connections are ours alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.errors import StateError
from broker.runtime.keys import GangKeys
from broker.runtime.transports.ssh_files import RemoteFiles, is_changed, list_entries, rename, split_path
from broker.runtime.transports.ssh_options import (
    SshAddress,
    make_options,
    name_control,
    parse_handle,
)
from broker.sites.openssh import escape, explain, make_control_folder

KEYS = GangKeys(folder=Path("/keys of/c-1"), alias="broker-1")
PLACE = SshAddress(user="ubuntu", host="10.0.0.1", port=2222)


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of sockets: a short path, as a user's own is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_every_key_exchange_is_known_to_the_clients_of_old_systems() -> None:
    """RHEL 8 has OpenSSH 8.0, Ubuntu 20.04 8.2: both refuse a list with `sntrup761x25519-sha512@openssh.com`."""
    known = {"curve25519-sha256", "curve25519-sha256@libssh.org", "ecdh-sha2-nistp256", "diffie-hellman-group14-sha256"}
    found = read_options()["KexAlgorithms"].split(",")
    assert set(found) <= known and found[0] == "curve25519-sha256"


def read_options() -> dict[str, str]:
    words = make_options(KEYS, PLACE, Path("/tmp/socket"))
    assert words[:4] == ["-F", "none", "-l", "ubuntu"]
    assert set(words[4::2]) == {"-o"}
    return dict(word.split("=", 1) for word in words[5::2])


def test_only_our_keys_and_the_nodes_own_host_key_are_used() -> None:
    options = read_options()
    assert options["StrictHostKeyChecking"] == "yes" and options["HostKeyAlias"] == "broker-1"
    assert options["UserKnownHostsFile"] == '"/keys of/c-1/known_hosts"'
    assert options["IdentityFile"] == '"/keys of/c-1/login"'
    assert (options["IdentitiesOnly"], options["IdentityAgent"]) == ("yes", "none")
    assert (options["BatchMode"], options["ForwardAgent"], options["UpdateHostKeys"]) == ("yes", "no", "no")
    assert options["Port"] == "2222"


def test_a_host_that_loses_power_is_noticed_within_seconds() -> None:
    options = read_options()
    assert (options["ConnectTimeout"], options["ServerAliveInterval"], options["ServerAliveCountMax"]) == (
        "5",
        "1",
        "3",
    )


def test_paths_are_quoted_as_ssh_reads_them() -> None:
    assert escape(Path("/a/b")) == "/a/b"
    assert escape(Path("/a b/%c")) == '"/a b/%%c"'


@pytest.mark.parametrize(
    ("handle", "place"),
    [
        ("ssh://u@h", SshAddress(user="u", host="h", port=22)),
        ("ssh://u.x-y@10.0.0.1:2222", SshAddress(user="u.x-y", host="10.0.0.1", port=2222)),
        ("ssh://u@[::1]:22", SshAddress(user="u", host="::1", port=22)),
    ],
)
def test_a_handle_is_user_host_and_port(handle: str, place: SshAddress) -> None:
    assert parse_handle(handle) == place


@pytest.mark.parametrize("handle", ["ssh://h", "ssh://-oProxyCommand=x@h", "ssh://u@-h", "ssh://u@h:x", "ssh://u@h\n"])
def test_a_handle_that_could_be_an_option_is_refused(handle: str) -> None:
    with pytest.raises(StateError):
        parse_handle(handle)


def test_each_host_user_port_and_gang_has_a_socket_of_its_own(sockets: Path) -> None:
    keys = GangKeys(folder=Path("/keys of/c-2"), alias="broker-1")
    places = [
        PLACE,
        SshAddress(user="root", host="10.0.0.1", port=2222),
        SshAddress(user="ubuntu", host="10.0.0.2", port=2222),
    ]
    names = {name_control(KEYS, place) for place in (*places, SshAddress(user="ubuntu", host="10.0.0.1"))}
    assert len(names | {name_control(keys, PLACE)}) == 5
    assert name_control(KEYS, PLACE) in names, "and always the same"
    assert all(len(str(name)) < 80 and name.parent.parent == sockets for name in names)


def test_sockets_are_in_a_private_folder_of_ours_or_nowhere(sockets: Path) -> None:
    folder = make_control_folder()
    assert folder.stat().st_mode & 0o777 == 0o700 and folder.name == f"broker-ssh-{os.getuid()}"
    assert make_control_folder() == folder
    for mode in (0o710, 0o701, 0o720):
        folder.chmod(mode)
        with pytest.raises(StateError):
            make_control_folder()
    folder.rmdir()
    (sockets / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(sockets / "elsewhere")
    with pytest.raises(StateError):
        make_control_folder()


def test_a_folder_of_another_user_is_refused(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    folder = sockets / f"broker-ssh-{uid + 1}"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(StateError):
        make_control_folder()


def test_a_long_temporary_folder_is_replaced_by_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 35)
    assert make_control_folder().parent == Path("/tmp")


def test_message_ends_with_the_last_line_of_ssh() -> None:
    assert explain(b"") == explain(b"\n \n") == ""
    assert explain(b"first\nlast \n\n") == ": last"
    assert explain(b"x" * 300) == ": " + "x" * 200
    for words in (b"REMOTE HOST IDENTIFICATION HAS CHANGED!\nmore", b"Host key verification failed.\nmore"):
        assert explain(words) == ": its host key is unknown or has changed"


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_target_is_a_folder_and_a_name() -> None:
    assert [split_path(path) for path in ("a/b/c", "c", "/c")] == [("a/b", "c"), (".", "c"), ("/", "c")]
    assert rename({"": (1, 2.0, "")}, "c") == {"c": (1, 2.0, "")} and rename({"d": (1, 2.0, "")}, "c") == {}


def test_entries_are_files_links_and_folders_below_the_source(tmp_path: Path) -> None:
    (tmp_path / "a" / "empty").mkdir(parents=True)
    (tmp_path / "a" / "f").touch()
    (tmp_path / "l").symlink_to("a")
    assert sorted(name for name, _ in list_entries(tmp_path)) == ["a", "a/empty", "a/f", "l"]


def test_files_of_the_same_size_and_time_are_not_sent_again(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "f", tmp_path / "d", tmp_path / "l"
    file.write_text("12345")
    os.utime(file, (1000.0, 1000.0))
    folder.mkdir()
    link.symlink_to("f")

    def changed(path: Path, known: tuple[int, float, str] | None) -> bool:
        files = {} if known is None else {"x": (*known, 0o644)}
        return is_changed(path, "x", RemoteFiles(is_folder=True, has_rsync=False, files=files))

    assert [changed(path, None) for path in (file, folder, link)] == [True, True, True]
    assert not changed(file, (5, 1000.0, "")) and not changed(file, (5, 1000.0 + 1e-6, ""))
    assert changed(file, (4, 1000.0, "")) and changed(file, (5, 1000.00001, "")) and changed(file, (5, 999.9, ""))
    assert not changed(folder, (0, 0.0, "")) and not changed(link, (0, 0.0, "f")) and changed(link, (0, 0.0, "g"))
