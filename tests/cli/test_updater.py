"""Prices that are updated in the background: when, how often, and what a command notices of it (nothing)."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.catalog.attempts import locate_attempts
from broker.catalog.bundle import locate_live_book, open_book
from broker.clock import SystemClock
from broker.locks import hold_lock
from tests.cli.test_catalog import Market, Mirror, mirror, write_vms
from tests.signals import signal_all
from tests.tiers import long, spread

__all__ = ["mirror"]  # a fixture
TASK = "resources: {infra: lambda, accelerators: A10}\nrun: x\n"


class Home(Market):
    """A terminal whose prices may be updated in the background; only lambda's are in use, and the mirror has them."""

    def __init__(self, folder: Path, mirror: Mirror) -> None:
        super().__init__(folder, mirror)
        for name in ("BROKER_OFFLINE", "CI"):
            self.shell.environment.pop(name, None)
        self.cache = folder / "broker"
        self.sell(1.1)
        self.shell.run("catalog", "update", "--cloud", "lambda")  # from now on lambda is in use, and no other cloud
        self.sell(1.2)
        self.task = self.shell.write("t.yaml", TASK)

    def age(self, hours: float) -> None:
        """Make the last attempts, and the last start of an updater, as much older."""
        path = locate_attempts(self.cache)
        found = json.loads(path.read_text())
        for each in found.values():
            each["attempted_s"] -= hours * 3600
        path.write_text(json.dumps(found))
        mark = self.cache / "price-updater.started"
        if mark.exists():
            os.utime(mark, (mark.stat().st_atime, mark.stat().st_mtime - hours * 3600))

    def wait(self) -> None:
        """Wait until every updater that was started has ended."""
        while find_updaters(self.cache):
            time.sleep(0.02)

    def plan(self) -> subprocess.CompletedProcess[str]:
        done = self.shell.run("plan", self.task)
        self.wait()
        return done

    def sum_prices(self) -> float:
        return sum(each.ondemand_usd_hour or 0.0 for each in open_book(self.cache).list_offers("lambda"))

    def read_attempt(self) -> dict[str, Any]:
        return dict(json.loads(locate_attempts(self.cache).read_text())["lambda"])


def find_updaters(cache: Path) -> list[int]:
    """List the updaters that run in this cache folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes().split(b"\0")
            # The command line is empty for an instant after the process was started.
            if (b"updater" in words or words == [b""]) and (each / "cwd").resolve(strict=True) == cache.resolve():
                found.append(int(each.name))
        except OSError:
            continue  # it ended meanwhile
    return found


@pytest.fixture
def home(tmp_path: Path, mirror: Mirror) -> Iterator[Home]:
    found = Home(tmp_path, mirror)
    yield found
    signal_all(find_updaters(found.cache))


def test_a_plan_on_prices_of_seven_hours_ago_starts_one_update_silently(home: Home) -> None:
    before = home.sum_prices()
    home.age(6.9)
    quiet = home.plan()
    assert home.sum_prices() == before, "fresh enough"
    home.age(0.2)
    done = home.plan()
    assert home.sum_prices() == pytest.approx(before * 1.2 / 1.1)
    assert (done.stdout, done.stderr) == (quiet.stdout, quiet.stderr)
    assert home.read_attempt()["error"] is None
    assert "lambda: 391 offers from skypilot" in (home.cache / "prices.log").read_text()
    asked = len(home.mirror.asked)
    home.plan()
    assert len(home.mirror.asked) == asked, "fresh again"


@pytest.mark.parametrize("switch", spread(["BROKER_OFFLINE", "CI", "config"], every=3))
def test_nothing_is_updated_where_updates_are_switched_off(home: Home, switch: str) -> None:
    if switch == "config":
        home.shell.home.mkdir(exist_ok=True)
        (home.shell.home / "config.toml").write_text("[catalog]\nauto_update = false\n")
    else:
        home.shell.environment[switch] = "1"
    home.age(100)
    asked = len(home.mirror.asked)
    home.plan()
    assert len(home.mirror.asked) == asked and not (home.cache / "price-updater.started").exists()
    assert home.shell.read_json("catalog", "status")["auto_update"] is False


@pytest.mark.long
def test_help_of_a_command_updates_nothing(home: Home) -> None:
    home.age(100)
    for words in (["plan"], ["advise"], ["jobs", "launch"]):
        home.shell.run(*words, "--help")
    assert not (home.cache / "price-updater.started").exists()


def test_every_environment_of_a_test_keeps_commands_offline() -> None:
    """A test that drops broker's variables switches updates off again; those listed start trainers only."""
    without = {
        "tests/docs/test_contributing.py", "tests/torture/references.py", "tests/trainers/conftest.py",
        "tests/trainers/strategies/conftest.py", "tests/trainers/test_bridge.py", "tests/trainers/test_faults.py",
        "tests/trainers/test_rendezvous_protocol.py", "tests/trainers/test_training.py",
    }  # fmt: skip
    folder = Path(__file__).parent.parent
    texts = {f"tests/{path.relative_to(folder)}": path.read_text() for path in folder.rglob("*.py")}
    dropping = {name for name, text in texts.items() if '"BROKER_"' in text and name != "tests/cli/test_updater.py"}
    assert {name for name in dropping if '"BROKER_OFFLINE": "1"' not in texts[name]} == without


@pytest.mark.parametrize("damage", spread(["offline", "damaged", "absurd"], every=0, more=3))
def test_a_failed_update_is_silent_keeps_the_prices_and_is_retried_with_backoff(home: Home, damage: str) -> None:
    before = home.sum_prices()
    if damage == "absurd":
        home.sell(100.0)
    else:
        page = (404, "") if damage == "offline" else (200, write_vms(home.offers, 1.3)[:-40])
        home.mirror.pages["/skypilot/lambda/vms.csv"] = page
    for hours, failures in ((8.0, 1), (0.2, 1), (0.1, 2), (0.4, 2), (0.2, 3)):
        home.age(hours)
        done = home.plan()
        assert "updat" not in done.stderr + done.stdout
        # The detached process may not have become an updater yet when `plan` has returned.
        home.shell.wait_until(lambda: home.read_attempt()["failures"] >= failures, "the update has failed")  # noqa: B023
        assert (home.read_attempt()["failures"], home.sum_prices()) == (failures, before)
        home.shell.wait_until(lambda: not find_updaters(home.cache), "it leaves room for the next one")
    (row,) = [each for each in home.shell.read_json("catalog", "status")["clouds"] if each["cloud"] == "lambda"]
    assert row["error"] and row["is_used"] and row["next_s"] == row["attempted_s"] + 3600
    shown = home.shell.run("catalog", "status").stdout
    assert "! lambda: " in shown


@long
def test_a_clock_set_back_delays_no_update(home: Home) -> None:
    home.age(-1000)
    home.plan()
    assert home.read_attempt()["attempted_s"] <= SystemClock().now_s()


@pytest.mark.long
def test_a_command_starts_no_second_update(home: Home) -> None:
    home.age(8)
    with hold_lock(home.cache / "price-updater.lock"):
        home.plan()
        assert not (home.cache / "price-updater.started").exists()
        done = home.shell.run("updater")
    assert done.stderr == "" and home.read_attempt()["attempted_s"] < SystemClock().now_s() - 3600


@long
def test_a_damaged_record_counts_as_missing(home: Home) -> None:
    before = home.sum_prices()
    locate_attempts(home.cache).write_text('{"lambda": {"attempted_s": "soon"')
    home.plan()
    assert home.sum_prices() > before and home.read_attempt()["failures"] == 0


@pytest.mark.long
def test_a_cache_that_cannot_be_written_starts_nothing(home: Home, tmp_path: Path) -> None:
    locked = tmp_path / "file"
    locked.write_text("")
    home.shell.environment["XDG_CACHE_HOME"] = str(locked)
    done = home.shell.run("plan", home.task)
    assert done.stderr.count("\n") <= 1
    assert not find_updaters(home.cache)


# Kills itself at the given one of the calls by which an update changes the disk.
KILLED = """
import os, runpy, signal, sqlite3, sys
last = int(os.environ["KILL_AT"])
seen = 0
def strike(event, arguments):
    global seen
    name = str(arguments[0]) if arguments else ""
    if event in ("os.rename", "os.remove", "sqlite3.connect") or event == "open" and arguments[2] & os.O_CREAT:
        if any(word in name for word in ("price", ".db")):
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(strike)
sys.argv[0] = "broker"
runpy.run_module("broker", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long  # some twenty updates, each of its own process
def test_update_killed_at_any_step_leaves_the_old_or_the_new_book(home: Home, tmp_path: Path) -> None:
    old = home.sum_prices()
    new = old * 1.2 / 1.1
    home.age(8)
    kept = tmp_path / "kept"
    shutil.copytree(home.cache, kept)
    ends = []
    for number in range(1, 60):
        shutil.rmtree(home.cache)
        shutil.copytree(kept, home.cache)
        done = subprocess.run(
            [sys.executable, "-c", KILLED, "updater"], capture_output=True, text=True, cwd=tmp_path, timeout=300,
            env={**home.shell.environment, "KILL_AT": str(number)},
        )  # fmt: skip
        total = home.sum_prices()
        assert total in (pytest.approx(old), pytest.approx(new)), f"killed at step {number}"
        ends.append((done.returncode, total == pytest.approx(new)))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        home.age(24)  # the next update also clears what the kill left
        home.shell.run("updater")
        assert home.sum_prices() == pytest.approx(new), f"after a kill at step {number}"
        assert not list(home.cache.glob("price*.tmp*")), f"after a kill at step {number}"
    assert ends[-1][0] == 0 and len(ends) > 8
    assert {is_new for code, is_new in ends if code} == {True, False}, "kills before and after the rename"
    assert locate_live_book(home.cache).exists()


@pytest.mark.parametrize("bytes_max", spread([100_000, 0, 6_000_000], every=0, more=3))
def test_on_a_full_disk_the_old_prices_stay_and_a_later_update_succeeds(home: Home, bytes_max: int) -> None:
    """A limit on the size of files fails writes as a full disk does, with another error code."""
    before = home.sum_prices()
    home.age(8)
    done = subprocess.run(
        [sys.executable, "-m", "broker", "updater"], capture_output=True, text=True, timeout=300,
        cwd=home.shell.folder, env=home.shell.environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, bytes_max)),
    )  # fmt: skip
    assert done.returncode != 0 and home.sum_prices() == before
    assert not list(home.cache.glob("price*.tmp*"))
    home.age(24)
    home.shell.run("updater")
    assert home.sum_prices() > before
