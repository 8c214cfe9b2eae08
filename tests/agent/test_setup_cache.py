"""The archive of a setup: what it covers, what it never holds, and that an incomplete one is never used."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.agent import FOLDER
from tests.tiers import examples

sys.path.insert(0, str(FOLDER))  # as on a node: siblings by bare names
setup: Any = importlib.import_module("agent_setup")
steps: Any = importlib.import_module("agent_setup_steps")
archive: Any = importlib.import_module("agent_setup_archive")
files: Any = importlib.import_module("agent_setup_files")
store: Any = importlib.import_module("agent_setup_store")
sys.path.remove(str(FOLDER))

ORDER = {
    "place": "/nowhere", "setup_chars": 4, "starts": 3.0, "usd_hour": 10.0, "usd_gib_kept": 0.0, "usd_gib_read": 0.0,
    "mounts": [], "checks_system": False, "is_fresh": False,
}  # fmt: skip


class Nodes:
    """Home folders of several nodes, and a store that outlives them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = store.FolderStore(root / "store")

    def make(self, name: str) -> Path:
        home = self.root / name
        (home / ".broker").mkdir(parents=True)
        (home / "sky_workdir").mkdir()
        (home / "sky_workdir" / "given.txt").write_text("given")
        return home

    def pack(self, home: Path, act: Callable[[Path], None], secrets: tuple[bytes, ...] = ()) -> dict[str, Any]:
        before = files.scan(home)
        act(home)
        entries, seen = files.list_changes(home, before)
        is_bound = archive.search(entries, home, secrets)
        parts = archive.pack(entries, home, seen, self.store.put)
        content = archive.encode({"entries": entries, "parts": parts, "size": 0, "setup_s": 1.0})
        return {**archive.decode(content), "is_bound": is_bound}

    def restore(self, manifest: dict[str, Any], home: Path) -> None:
        staged = home / ".broker" / "staged"
        archive.stage(manifest, self.store.get, staged, "digest")
        assert archive.merge(staged, home) == "digest"


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def describe(home: Path) -> dict[str, object]:
    """Everything below the home folder but what is ours: kind, mode, content or target, and links of one file."""
    found: dict[str, object] = {}
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home).as_posix()
        if name.startswith(".broker/") and not name.startswith(".broker/python/"):
            continue
        state = path.lstat()
        kind = "link" if path.is_symlink() else "dir" if path.is_dir() else "file"
        content = str(path.readlink()).encode() if kind == "link" else path.read_bytes() if kind == "file" else b""
        times = (state.st_mtime_ns, state.st_nlink) if kind == "file" else ()
        found[name] = (kind, state.st_mode if kind != "link" else 0, content, times)
    return found


def install(home: Path) -> None:
    """Do what setups do: an environment with links, compiled files, changes of given files, removals."""
    tools = home / "venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "tool").write_bytes(os.urandom(3000))
    (tools / "tool").chmod(0o755)
    os.utime(tools / "tool", ns=(10**18 + 1, 10**18 + 1))
    os.link(tools / "tool", tools / "same")
    (tools / "python").symlink_to("/usr/bin/python3")
    (home / "venv" / "empty").write_bytes(b"")
    (home / "venv" / "closed").mkdir(mode=0o555)
    python = home / ".broker" / "python" / "node"
    python.mkdir(parents=True)
    (python / "torch.py").write_text("torch")
    (home / "sky_workdir" / "built.so").write_bytes(b"\0" * 70_000)
    (home / "sky_workdir" / "given.txt").unlink()


def test_restored_node_equals_the_one_that_was_set_up(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "PART_BYTES", 1000)
    first, second = nodes.make("first"), nodes.make("second")
    manifest = nodes.pack(first, install)
    assert len(manifest["parts"]) > 10 and not manifest["is_bound"]
    nodes.restore(manifest, second)
    assert describe(second) == describe(first)
    assert not (second / ".broker" / "staged").exists()


def test_archive_that_names_its_home_folder_is_bound_to_it(nodes: Nodes) -> None:
    def write(home: Path) -> None:
        (home / "script").write_text(f"#!{home}/venv/bin/python\n")

    assert nodes.pack(nodes.make("one"), write)["is_bound"]

    def link(home: Path) -> None:
        (home / "here").symlink_to(home / "sky_workdir")

    assert nodes.pack(nodes.make("two"), link)["is_bound"]


@pytest.mark.parametrize("part_bytes", [7, 1000])
def test_each_damage_of_a_part_is_found_before_a_file_is_moved(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(archive, "PART_BYTES", part_bytes)

    def write(home: Path) -> None:
        (home / "data").write_bytes(bytes(range(50)))

    manifest = nodes.pack(nodes.make("first"), write)
    second = nodes.make("second")
    before = describe(second)
    for digest, size in manifest["parts"]:
        name = archive.name_part(digest)
        whole = nodes.store.get(name)
        for content in (whole[: size - 1], whole + b"x", bytes([whole[0] ^ 1]) + whole[1:], None):
            (nodes.root / "store" / name).unlink(missing_ok=True)
            if content is not None:
                nodes.store.put(name, content)
            with pytest.raises(archive.DamagedArchive):
                archive.stage(manifest, nodes.store.get, second / ".broker" / "staged", "digest")
            assert archive.merge(second / ".broker" / "staged", second) == "" and describe(second) == before
        nodes.store.put(name, whole)
    nodes.restore(manifest, second)
    assert (second / "data").read_bytes() == bytes(range(50))


def test_merge_killed_at_any_effect_is_finished_by_the_next(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nodes.make("first")
    manifest = nodes.pack(first, install)

    class Killed(BaseException):
        pass

    real = Path.replace
    for count in range(1, 50):
        home = nodes.make(f"node-{count}")
        staged = home / ".broker" / "staged"
        archive.stage(manifest, nodes.store.get, staged, "digest")
        left = count

        def replace(path: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if not left:
                raise Killed
            return real(path, target)

        monkeypatch.setattr(Path, "replace", replace)
        try:
            archive.merge(staged, home)
        except Killed:
            assert staged.exists()
            monkeypatch.setattr(Path, "replace", real)
            assert archive.merge(staged, home) == "digest"
        else:
            break
        assert describe(home) == describe(first)
    assert count > 3, "it was killed at several places"


def test_files_that_were_staged_before_a_reboot_are_not_used(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss may have left them empty."""
    manifest = nodes.pack(nodes.make("first"), install)
    home = nodes.make("second")
    staged = home / ".broker" / "staged"
    archive.stage(manifest, nodes.store.get, staged, "digest")
    before = describe(home)
    with monkeypatch.context() as patch:
        patch.setattr(archive.agent_files, "read_boot", lambda: "another boot")
        assert archive.merge(staged, home) == "" and describe(home) == before
    assert archive.merge(staged, home) == "digest"


@pytest.mark.parametrize(
    "path", ["../out", "/etc/x", "a/../../x", ".ssh/authorized_keys", ".broker/lease.json", ".netrc", ""]
)
def test_archive_with_a_path_that_no_setup_has_is_refused(nodes: Nodes, path: str) -> None:
    with pytest.raises(archive.DamagedArchive):
        archive.check_paths([files.Change(path, files.FILE)])


def test_archive_with_a_file_below_its_own_link_is_refused() -> None:
    with pytest.raises(archive.DamagedArchive):
        archive.check_paths([files.Change("a", files.LINK, target="/etc"), files.Change("a/passwd", files.FILE)])


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda home: (home / ".netrc").write_text("password x"), "where tools keep logins"),
        (lambda home: (home / "x").write_bytes(b"a" * 5000 + b"s3cr3t-value" + b"b" * 5000), "a secret"),
        (lambda home: (home / "x").symlink_to("https://u:s3cr3t-value@host"), "a secret"),
    ],
)
def test_setup_that_writes_a_login_is_not_kept(nodes: Nodes, write: Callable[[Path], None], reason: str) -> None:
    with pytest.raises(files.NotCacheable, match=reason):
        nodes.pack(nodes.make("node"), write, secrets=(b"s3cr3t-value",))
    assert not (nodes.root / "store").exists()


def test_file_that_the_program_changes_while_it_is_packed_is_found(nodes: Nodes) -> None:
    home = nodes.make("node")
    before = files.scan(home)
    (home / "x").write_bytes(b"1" * 100)
    entries, seen = files.list_changes(home, before)
    (home / "x").write_bytes(b"2" * 100)
    with pytest.raises(files.NotCacheable, match="changed after setup"):
        archive.pack(entries, home, seen, nodes.store.put)


def test_our_own_files_are_never_among_the_changes(nodes: Nodes) -> None:
    home = nodes.make("node")
    before = files.scan(home)
    for name in (".broker/lease.json", ".broker/runs/1/spec.json", ".cache/pip/http/x"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("token")
    entries, _ = files.list_changes(home, before)
    assert [each.path for each in entries] == [".cache"]


def test_change_outside_the_home_folder_is_found(tmp_path: Path) -> None:
    system = tmp_path / "usr"
    (system / "lib").mkdir(parents=True)
    (system / "lib" / "old").write_text("x")
    since_s = max(each.lstat().st_ctime for each in (system, system / "lib", system / "lib" / "old"))
    assert files.find_system_change(since_s + 1.0, [str(system), str(tmp_path / "none")]) == ""
    assert files.find_system_change(since_s, [str(system)]).startswith(str(system))


names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..", ".broker", ".cache", ".local")
)
trees = st.dictionaries(names, st.tuples(st.binary(max_size=20), st.booleans()), max_size=4)


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=trees, other=trees)
def test_digest_of_a_folder_differs_exactly_if_its_content_does(tmp_path_factory: Any, one: Any, other: Any) -> None:
    digests = []
    for tree in (one, other):
        folder = tmp_path_factory.mktemp("tree")
        for name, (content, is_executable) in tree.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o700 if is_executable else 0o600)
        digests.append(files.digest_tree(folder))
    assert (digests[0] == digests[1]) == (one == other)


@pytest.mark.parametrize(
    "change",
    [
        {"setup_digest": "other"},
        {"secrets": {"HF_TOKEN": "x"}},
        {"num_nodes": 2},
        {"gpus_per_node": 8.0},
        {"trainers": "other"},
        {"envs": {"BROKER_CHECKPOINT_DIR": "s3://bucket/x"}},
        {},
    ],
)
def test_key_covers_what_setup_gets(nodes: Nodes, change: dict[str, Any]) -> None:
    home = nodes.make("node")
    order = setup.CacheOrder(**ORDER)
    spec: dict[str, Any] = {
        "setup_digest": "d", "secrets": {}, "num_nodes": 1, "gpus_per_node": 0.0, "trainers": None,
        "envs": {"BROKER_CHECKPOINT_DIR": "/home/x/checkpoints"},
    }  # fmt: skip
    key = steps.make_key(order, spec, home, {})
    other = steps.make_key(order, {**spec, **change}, home, {})
    assert (key == other) == (not change)
    secret = steps.make_key(order, {**spec, "secrets": {"HF_TOKEN": "y"}}, home, {})
    assert secret == steps.make_key(order, {**spec, "secrets": {"HF_TOKEN": "x"}}, home, {}), "no value, only names"
    (home / "sky_workdir" / "given.txt").write_text("changed")
    assert steps.make_key(order, spec, home, {}) != key


def test_key_covers_packages_and_processor() -> None:
    assert files.describe_node(["lib/torch-2.0.dist-info"]) != files.describe_node(["lib/torch-2.1.dist-info"])
    assert files.describe_processor("flags : sse4_2 avx2 bmi1 bmi2 f16c fma movbe\n") == "v3"
    assert files.describe_processor("flags : sse4_2\n") == "v2"
    assert files.describe_processor("Features : fp asimd sve\n") == "asimd fp sve"


@pytest.mark.parametrize(
    ("change", "setup_s", "gib", "pays"),
    [
        ({}, 600.0, 5.0, True),
        ({"starts": 0.0}, 600.0, 5.0, False),
        ({}, 50.0, 5.0, False),  # 5 GiB take 54 s to read
        # Three starts save 546 s each, 4.55 USD at 10 USD/h; 5 GiB for 0.95 USD each cost more.
        ({"usd_gib_kept": 0.95}, 600.0, 5.0, False),
        ({"usd_gib_kept": 0.90}, 600.0, 5.0, True),
        ({"usd_gib_read": 0.31}, 600.0, 5.0, False),
        ({"usd_gib_read": 0.30}, 600.0, 5.0, True),
        ({"usd_hour": 0.0}, 600.0, 5.0, True),  # own machines and a folder: time alone
    ],
)
def test_archive_is_kept_if_the_starts_that_are_expected_pay_for_it(
    change: dict[str, float], setup_s: float, gib: float, pays: bool
) -> None:
    order = setup.CacheOrder(**{**ORDER, **change})
    assert (steps.refuse(order, setup_s=setup_s, size_bytes=int(gib * 2**30)) == "") is pays


@pytest.mark.parametrize("value", [None, "", "x", "[]", '{"place": "/x"}', json.dumps({**ORDER, "setup_chars": 99})])
def test_invalid_order_means_that_nothing_is_cached(value: str | None) -> None:
    envs = {} if value is None else {setup.VARIABLE: value}
    assert setup.read_order({"envs": envs, "setup": "true", "setup_digest": "d"}) is None


def test_run_in_a_container_is_not_cached() -> None:
    spec = {"envs": {setup.VARIABLE: json.dumps(ORDER)}, "setup": "true", "setup_digest": "d"}
    assert setup.read_order(spec) is not None and setup.read_order({**spec, "image": "ubuntu"}) is None
    assert setup.read_order({**spec, "setup_digest": None}) is None, "only a managed job's"
