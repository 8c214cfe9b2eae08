"""Options on the command line override the task file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.app.overrides import Overrides, read_pairs, read_task
from broker.cli.main import main
from broker.errors import TaskError, UsageError

FILE = "name: train\nresources: {infra: local}\nenvs: {A: file, B: file, C: file}\nrun: echo\n"


@pytest.fixture
def task_file(tmp_path: Path) -> str:
    path = tmp_path / "train.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize("verb", [["launch"], ["jobs", "launch"], ["serve", "up"], ["rehearse"]])
@pytest.mark.parametrize("words", [[""], ["  "], ["", ""]])
def test_empty_command_starts_nothing(
    verb: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As of an unset variable: a machine would be paid for that runs nothing."""
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*verb, *words])
    assert "error: the task file or command is empty" in capsys.readouterr().err


def test_blank_program_is_no_managed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would pay for a machine, and succeed."""
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    (tmp_path / "blank.yaml").write_text("resources: {infra: local}\nrun: '  '\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["jobs", "launch", str(tmp_path / "blank.yaml"), "--dryrun"])
    assert "has no `run:`" in capsys.readouterr().err


def test_flags_override_the_env_file_which_overrides_the_task(
    task_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("# secrets of mine\nexport B='from file'\n\nC=file too\n")
    monkeypatch.setenv("D", "from the shell")
    task = read_task([task_file], Overrides(env=["C=flag", "D"], env_file=tmp_path / ".env"))
    assert task.envs == {"A": "file", "B": "from file", "C": "flag", "D": "from the shell"}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1 # one", "1"),
        ("A='1 # one'  # one", "1 # one"),
        ('A="a b" #', "a b"),
        ("A=a#b", "a#b"),
        ("A=#b", "#b"),
        ("A=it's", "it's"),
        ("A=  # one", ""),
        ("A=", ""),
        ("B=b\nA=${B}/c", "b/c"),
        ("A=${FROM_SHELL}${NONE:-d}${NONE:-}$NONE", "shelld$NONE"),
        ("A='${B}'", "${B}"),
        ('A="a\\nb\\"c\\d"', 'a\nb"c\\d'),
        ("A='a\\nb'", "a\\nb"),
        ('A="-----BEGIN\nKEY # x\n-----END"\nB=b', "-----BEGIN\nKEY # x\n-----END"),
        ("A='{\"a\": 1}' # JSON\r\nB=b\r\n", '{"a": 1}'),
        ('A="{"a": "b"}"', '{"a": "b"}'),
        ("\ufeffA=1", "1"),
    ],
)
def test_values_of_an_env_file_are_those_of_python_dotenv(
    task_file: str, tmp_path: Path, line: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_SHELL", "shell")
    (tmp_path / ".env").write_bytes(line.encode())
    assert read_task([task_file], Overrides(env_file=tmp_path / ".env")).envs["A"] == value


def test_env_file_that_cannot_be_read_is_named(task_file: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read `--env-file .*`: no such file or directory$"):
        read_task([task_file], Overrides(env_file=tmp_path / "none"))
    (tmp_path / ".env").write_bytes(b"A=\xff")
    with pytest.raises(UsageError, match=r"it is not UTF-8 text$"):
        read_task([task_file], Overrides(env_file=tmp_path / ".env"))


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("A=1\nno equals", "env:2: expected"),
        ("1A=3", "env:1: expected"),
        ("A='a\nb'\n\nÉ=3", "env:4: expected"),
        ("A=1\nB='b", "env:2: a quote is not closed"),
        ("A=1\nB=${NOT_SET}", "env:2: `NOT_SET` has no value"),
    ],
)
def test_a_bad_env_file_names_the_line(task_file: str, tmp_path: Path, line: str, place: str) -> None:
    (tmp_path / ".env").write_text(line)
    with pytest.raises(UsageError, match=place):
        read_task([task_file], Overrides(env_file=tmp_path / ".env"))


def test_a_key_without_a_value_must_be_set_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(UsageError, match="NOT_SET"):
        read_pairs(["NOT_SET"], "--env")


@pytest.mark.parametrize(
    ("words", "run"),
    [
        (["echo a; echo b"], "echo a; echo b"),
        (["python", "-c", "print('a b')"], "python -c 'print('\"'\"'a b'\"'\"')'"),
    ],
)
def test_a_command_is_accepted_as_a_task(words: list[str], run: str) -> None:
    task = read_task(words, Overrides(infra="local", num_nodes=2, env=["A=1"], name="quick"))
    assert (task.name, task.run, task.num_nodes, task.envs) == ("quick", run, 2, {"A": "1"})
    assert [each.cloud for each in task.resources] == ["local"]


def test_paths_count_from_where_the_command_was_given(
    task_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path)
    task = read_task([task_file], Overrides(workdir=Path("code")))
    assert task.workdir == str(tmp_path / "code")
    with pytest.raises(UsageError, match="missing"):
        read_task([task_file], Overrides(workdir=Path("missing")))


@pytest.mark.parametrize(
    "overrides",
    [
        Overrides(name="a\nb"),
        Overrides(env=["1A=x"]),
        Overrides(secret=["A-B=x"]),
        Overrides(infra="aws/-x"),
        Overrides(instance_type="a b"),
    ],
    ids=str,
)
def test_a_flag_follows_the_rules_of_the_task_file(task_file: str, overrides: Overrides) -> None:
    with pytest.raises((UsageError, TaskError), match="must be"):
        read_task([task_file], overrides)


@pytest.mark.parametrize("flag", ["env", "secret"])
def test_a_value_that_no_program_can_be_given_is_refused_and_not_shown(
    task_file: str, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2" + "x" * 140_000)
    with pytest.raises(UsageError, match="TOKEN") as caught:
        read_task([task_file], Overrides(**{flag: ["TOKEN"]}))
    assert "hunter2" not in f"{caught.value.message} {caught.value.hints}"


def test_a_line_of_an_env_file_follows_the_rules(task_file: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=hunter2\0x\n")
    with pytest.raises(UsageError, match="env:1") as caught:
        read_task([task_file], Overrides(env_file=tmp_path / ".env"))
    assert "hunter2" not in caught.value.message


def test_an_argument_that_is_not_utf8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["status", "\udcff"])
    assert left.value.code == 2
    assert "argument 2 is not UTF-8 text" in capsys.readouterr().err


def test_task_from_a_pipe_is_a_task_with_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    """`broker launch <(envsubst < train.yaml)`: not a command that runs `/dev/fd/63`."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        file.write(FILE)
    pipe = f"/dev/fd/{reading}"
    task = read_task([pipe], Overrides(num_nodes=3))
    assert (task.name, task.run, task.num_nodes) == ("train", "echo", 3)
    os.close(reading)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        file.write(FILE)
    with pytest.raises(SystemExit) as left:
        main(["plan", f"/dev/fd/{reading}", "--num-nodes", "2"])
    os.close(reading)
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("Task train: 2 nodes\n")


def test_dash_is_not_taken_as_a_command() -> None:
    with pytest.raises(UsageError, match="`-` is not a task file") as caught:
        read_task(["-"], Overrides())
    assert caught.value.hints == ("read a task from standard input with `/dev/stdin`",)


def test_command_in_one_long_word_is_a_command() -> None:
    command = "echo " + "a" * 400
    assert read_task([command], Overrides()).run == command


def test_mistyped_file_has_the_near_miss_in_its_folder_as_a_hint(task_file: str) -> None:
    with pytest.raises(TaskError) as caught:
        read_task([task_file.replace("train.yaml", "trian.yml")], Overrides())
    assert [each.hint for each in caught.value.issues] == ["did you mean `train.yaml`?"]


def test_gpus_none_removes_the_accelerators_of_a_task_as_in_skypilot(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("resources: {accelerators: {A100: 8, H100: 8}, cpus: 4+, labels: {team: vision}}\nrun: echo\n")
    (only,) = read_task([str(path)], Overrides(gpus="None")).resources
    assert (only.accelerator, only.accelerator_count) == (None, 0)
    assert only.cpus and only.labels == {"team": "vision"}
    assert read_task(["echo"], Overrides(gpus="none", infra="local")).resources[0].accelerator is None


def test_name_price_and_duration_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("name: file\nresources: {infra: local, max_hourly_cost: 9}\nmax_duration: 2h\nrun: echo\n")
    kept = read_task([str(path)], Overrides())
    assert (kept.name, kept.resources[0].usd_hour_max, kept.max_duration_s) == ("file", 9.0, 7200.0)
    task = read_task([str(path)], Overrides(name="flag", max_price=0.0, max_duration="1m"))
    assert (task.name, task.resources[0].usd_hour_max, task.max_duration_s) == ("flag", 0.0, 60.0)
    assert read_task([str(path)], Overrides(max_duration="off")).max_duration_s is None
    assert read_task([str(path)], Overrides(max_duration="90")).max_duration_s == 90.0
    with pytest.raises(UsageError, match="at least 1m"):
        read_task([str(path)], Overrides(max_duration="59"))


def test_folder_of_the_command_line_replaces_the_repository_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("workdir: {url: 'https://git.example/a.git', ref: main}\nresources: {infra: local}\nrun: echo\n")
    assert read_task([str(path)], Overrides()).repository is not None
    task = read_task([str(path)], Overrides(workdir=tmp_path))
    assert task.repository is None and task.workdir == str(tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        read_task([str(path)], Overrides(workdir=path))
