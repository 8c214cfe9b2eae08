"""`trainers.venv` makes an environment once for each set of packages; uv and the index are faked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainers import setup, venv

# Makes `bin/python` for `uv venv`, and a program for `uv pip install`; the calls are counted in a file.
UV = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in
  --version) echo "uv 99.0.0" ;;
  venv) for last; do :; done; mkdir -p "$last/bin"; ln -s "$PYTHON" "$last/bin/python" ;;
  pip) python=$5; [ -z "$FAILS" ] || exit 1; tool="${python%/*}/tool"
       echo '#!/bin/sh' > "$tool"; echo 'echo from the tool' >> "$tool"; chmod +x "$tool" ;;
esac
"""


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "programs").mkdir()
    uv = tmp_path / "programs/uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    monkeypatch.setattr(setup.node_uv, "RETRY_S", 0.0)
    return {
        "PATH": f"{tmp_path / 'programs'}:/usr/bin:/bin", "BROKER_PYTHON": str(tmp_path / "python"),
        "BROKER_VENVS": str(tmp_path / "venvs"), "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "CALLS": str(tmp_path / "calls"), "PYTHON": sys.executable,
    }  # fmt: skip


def count_installs(variables: dict[str, str]) -> int:
    calls = Path(variables["CALLS"])
    return sum(line.startswith("pip install") for line in calls.read_text().splitlines()) if calls.exists() else 0


def test_same_packages_are_installed_once(variables: dict[str, str], tmp_path: Path) -> None:
    first = venv.prepare(["b==2", "a==1"], ">=3.11", variables)
    other_node = {**variables, "BROKER_PYTHON": str(tmp_path / "other")}
    assert venv.prepare(["a==1", "b==2"], ">=3.11", other_node) == first
    assert count_installs(variables) == 1
    assert venv.prepare(["a==2"], ">=3.11", variables) != first
    assert count_installs(variables) == 2


def test_programs_of_the_environment_are_linked_and_those_of_another_removed(variables: dict[str, str]) -> None:
    links = Path(variables["BROKER_PYTHON"]) / "bin"
    links.mkdir(parents=True)
    (links / "left-over").touch()
    venv.prepare(["a==1"], ">=3.11", variables)
    assert sorted(path.name for path in links.iterdir()) == ["python", "tool"]
    assert subprocess.run([links / "tool"], capture_output=True, text=True).stdout == "from the tool\n"


def test_interrupted_installation_is_repeated(variables: dict[str, str]) -> None:
    with pytest.raises(setup.SetupError, match="uv pip install"):
        venv.prepare(["a==1"], ">=3.11", {**variables, "FAILS": "1"})
    before = count_installs(variables)
    venv.prepare(["a==1"], ">=3.11", variables)
    assert count_installs(variables) == before + 1


def test_requirement_without_a_version_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(setup.SetupError, match=r"not an exact version: jax>=0\.4"):
        venv.prepare(["jax>=0.4"], ">=3.11", variables)
    assert count_installs(variables) == 0


def test_key_depends_on_what_is_installed() -> None:
    keys = {
        venv.make_key(["a==1"], ">=3.11", "cpu", {}),
        venv.make_key(["a==1"], ">=3.11", "cuda", {}),
        venv.make_key(["a==1"], ">=3.12", "cpu", {}),
        venv.make_key(["a==1"], ">=3.11", "cuda", {"UV_TORCH_BACKEND": "cu126"}),
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("chosen", "build"),
    [
        ({}, "cu126"),  # from PyTorch's own index: CUDA 13 would not run on this driver
        ({"UV_TORCH_BACKEND": "cu118"}, "cu118"),
        ({"UV_DEFAULT_INDEX": "https://mine/simple"}, ""),  # what it has is the build
    ],
)
def test_build_of_torch_is_the_drivers_unless_the_user_says_where_packages_come_from(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], build: str
) -> None:
    monkeypatch.setattr(setup.node_uv, "PIP_FILES", ())  # this machine's own
    smi = tmp_path / "programs/nvidia-smi"
    smi.write_text('#!/bin/sh\necho "NVIDIA H100, 550.163.01, 9.0"\n')
    smi.chmod(0o755)
    uv = tmp_path / "programs/uv"
    uv.write_text(UV.replace('echo "$@" >>', 'echo "build=$UV_TORCH_BACKEND $@" >>'))
    venv.prepare(["torch==2.13.0"], ">=3.11", {**variables, **chosen, "SKYPILOT_NUM_GPUS_PER_NODE": "8"})
    (made,) = [line for line in Path(variables["CALLS"]).read_text().splitlines() if " pip install" in line]
    assert made.startswith(f"build={build} ")


def test_local_nodes_share_environments(variables: dict[str, str]) -> None:
    del variables["BROKER_VENVS"]
    node = {**variables, "BROKER_NODE_DIR": "/somewhere", "HOME": "/somewhere/home"}
    assert venv.find_cache(node).name == "venvs" and not str(venv.find_cache(node)).startswith("/somewhere")
    assert venv.find_cache(variables) == Path(variables["BROKER_PYTHON"]) / "venvs"


def test_command_says_why_it_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("BROKER_PYTHON", raising=False)
    assert venv.main(["a==1"]) == 1
    assert "BROKER_PYTHON is not set" in capsys.readouterr().err
    assert os.environ.get("BROKER_PYTHON") is None
