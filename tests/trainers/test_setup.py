"""`trainers.setup` takes the Python that fits, and installs one where none does; everything outside is faked."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trainers import node_uv, setup
from trainers.node_gpus import CPU, TORCH, Accelerator, SetupError, choose_build, find_accelerator
from trainers.node_pythons import judge, list_candidates
from trainers.node_uv import UV, fetch, list_pages, names_index, read_settings

SYSTEM = "/usr/bin:/bin"
H100 = Accelerator("cuda", "NVIDIA H100", (580, 95, 5), (9, 0))


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_uv, "PIP_FILES", ())
    monkeypatch.setattr(node_uv, "RETRY_S", 0.0)
    monkeypatch.setattr("trainers.node_pythons.WELL_KNOWN", ())
    monkeypatch.setattr("trainers.node_gpus.NVIDIA_VERSION", Path("/nowhere"))


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def write_python(
    path: Path, *, python: str = "[3, 11]", torch: str = "2.13.0", cuda: str = "null", works: bool = True
) -> Path:
    """Write an interpreter that only reports what it has."""
    said = f'{{"python": {python}, "torch": "{torch}", "cuda": {cuda}, "rocm": null, "has_buckets": false}}'
    check = "exit 0" if works else "echo 'RuntimeError: no kernel image' >&2; exit 1"
    return write_program(path, f"case \"$2\" in *float*) {check} ;; *) echo '{said}' ;; esac")


def write_nvidia_smi(folder: Path, line: str, code: int = 0) -> Path:
    return write_program(folder / "nvidia-smi", f"echo '{line}'; exit {code}")


# The node's accelerator, and the build for it


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [
        ((580, 95, 5), (9, 0), "cu130"),  # H100 on a new driver
        ((580, 95, 5), (10, 0), "cu130"),  # B200
        ((550, 163, 1), (9, 0), "cu126"),  # CUDA 12.6 runs on any driver of CUDA 12
        ((525, 60, 13), (8, 0), "cu126"),
        ((580, 95, 5), (7, 0), "cu126"),  # V100: CUDA 13 has no kernels for it
        ((580, 95, 5), (), "cu130"),  # known to have a driver only
        ((570, 86, 10), (10, 0), "580"),  # B200 has no kernels in CUDA 12.6
        ((470, 82, 1), (8, 0), "525.60.13"),
    ],
)
def test_build_fits_driver_and_gpu(driver: tuple[int, ...], capability: tuple[int, ...], build: str) -> None:
    found = Accelerator("cuda", "NVIDIA X", driver, capability)
    if build.startswith("cu"):
        assert choose_build(found) == build
    else:
        with pytest.raises(SetupError, match=f"needs NVIDIA driver {build} for NVIDIA X"):
            choose_build(found)


def test_gpu_is_what_nvidia_smi_says(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, "NVIDIA H100, 580.95.05, 9.0")
    asked = {"PATH": str(tmp_path), "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    assert find_accelerator(asked) == H100
    assert find_accelerator({**asked, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}) == CPU, "the task asks for none"


def test_node_whose_driver_fails_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, "NVIDIA-SMI has failed: no communication with the driver", code=9)
    asked = {"PATH": str(tmp_path), "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    with pytest.raises(SetupError, match="`nvidia-smi` fails on this node: NVIDIA-SMI has failed"):
        find_accelerator(asked)
    assert find_accelerator({**asked, "BROKER_NODE_DIR": "/n"}) == CPU
    assert find_accelerator({"PATH": str(tmp_path)}) == CPU, "an image for GPUs on a node without any"


def test_node_without_the_gpus_that_were_asked_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.node_gpus.PCI", tmp_path / "pci")
    asked = {"PATH": str(tmp_path), "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    with pytest.raises(SetupError, match="requests 8 accelerators"):
        find_accelerator(asked)
    device = tmp_path / "pci/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    with pytest.raises(SetupError, match="no driver"):
        find_accelerator(asked)
    assert find_accelerator({**asked, "BROKER_NODE_DIR": "/n"}) == CPU, "the local cloud stands in for GPUs"


# The Python that is there


def test_python_of_this_test_fits_a_node_without_gpus() -> None:
    python, reason = judge(sys.executable, CPU)
    assert python and not reason and python.torch.startswith(TORCH)


@pytest.mark.parametrize(
    ("options", "found", "reason"),
    [
        ({"torch": "2.5.1"}, CPU, "need torch 2.6, this is 2.5.1"),
        ({"python": "[3, 9]"}, CPU, "need Python 3.10, this is 3.9"),
        ({"torch": ""}, CPU, ""),
        ({}, H100, "not built for NVIDIA H100"),
        ({"cuda": '"12.6"', "works": False}, H100, "does not work on NVIDIA H100: RuntimeError: no kernel image"),
    ],
)
def test_unsuitable_python_is_refused_with_the_reason(
    tmp_path: Path, options: dict[str, str], found: Accelerator, reason: str
) -> None:
    python, said = judge(str(write_python(tmp_path / "python", **options)), found)  # type: ignore[arg-type]
    assert python is None and (reason in said if reason else said == "")


def test_python_whose_torch_works_on_the_gpu_is_taken(tmp_path: Path) -> None:
    path = write_python(tmp_path / "python", cuda='"12.6"')
    assert judge(str(path), H100)[0] is not None


def test_python_on_the_path_is_tried_first_and_a_broken_shim_is_skipped(tmp_path: Path) -> None:
    shim = write_program(tmp_path / "python", "exit 127")
    write_python(tmp_path / "python3")
    assert next(list_candidates(None, {"PATH": str(tmp_path)})) == str(shim)
    assert judge(str(shim), CPU) == (None, "")


# What setup leaves behind


def run_setup(folder: Path, path: str, **variables: str) -> None:
    setup.prepare({"PATH": path, "HOME": str(folder), "BROKER_PYTHON": str(folder / "python"), **variables})


def test_python_that_fits_is_left_as_it_is(tmp_path: Path) -> None:
    """A rehearsal on a laptop: nothing is fetched, and no name means another Python."""
    write_python(tmp_path / "bin/python")
    run_setup(tmp_path, f"{tmp_path}/python/bin:{tmp_path}/bin:{SYSTEM}", UV_DEFAULT_INDEX="http://127.0.0.1:9")
    assert not (tmp_path / "python").exists()


def test_python_that_only_another_name_leads_to_becomes_python(tmp_path: Path) -> None:
    """Ubuntu has `python3` alone."""
    path = write_python(tmp_path / "bin/python3")
    path.write_text(path.read_text() + '[ "$1" = tell ] && echo "it is me, $2"\ntrue\n')
    run_setup(tmp_path, f"{tmp_path}/bin")
    for name in ("python", "python3"):
        done = subprocess.run([tmp_path / "python/bin" / name, "tell", "a b"], capture_output=True, text=True)
        assert "it is me, a b\n" in done.stdout, done
    run_setup(tmp_path, f"{tmp_path}/python/bin:{tmp_path}/bin")
    assert f"exec {path} " in (tmp_path / "python/bin/python").read_text(), "its own link is not taken for a Python"


FAKE_UV = """\
echo "$UV_TORCH_BACKEND $*" >> "$HOME/calls"
[ "$1" = venv ] && for each; do last=$each; done && mkdir -p "$last/bin" && cp "$HOME/made" "$last/bin/python"
[ "$1" = "$FAILS" ] && exit 3
case "$*" in *--target*) while [ "$1" != --target ]; do shift; done; mkdir -p "$2" ;; esac
exit 0
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the shape of the simple index, with a wheel of a fake uv."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(f"uv-{UV}.data/scripts/uv", f"#!/bin/sh\n{FAKE_UV}")
    name = "uv-pretended.whl"
    (tmp_path / "simple/uv").mkdir(parents=True)
    (tmp_path / "simple/uv" / name).write_bytes(packed.getvalue())
    wheel = (name, hashlib.sha256(packed.getvalue()).hexdigest())
    monkeypatch.setattr(node_uv, "WHEELS", {key: wheel for key in node_uv.WHEELS})
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # this test's own has torch
    write_python(tmp_path / "made")
    return tmp_path / "simple"


def read_calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def test_torch_is_installed_once_where_no_python_has_it(tmp_path: Path, index: Path) -> None:
    for _ in range(2):
        run_setup(tmp_path, SYSTEM, UV_DEFAULT_INDEX=f"file://{index}")
    made, installed = read_calls(tmp_path)
    assert made.split()[:3] == ["venv", "--python", ">=3.10,<3.15"]
    assert f"torch=={TORCH}" in installed and "obstore" not in installed
    assert f"exec {tmp_path}/python/venv/bin/python" in (tmp_path / "python/bin/python").read_text()
    assert stat.S_IMODE((tmp_path / f"python/uv-{UV}").stat().st_mode) == 0o755


def test_installation_that_was_interrupted_is_done_again(tmp_path: Path, index: Path) -> None:
    with pytest.raises(SetupError, match="failed with code 3"):
        run_setup(tmp_path, SYSTEM, UV_DEFAULT_INDEX=f"file://{index}", FAILS="pip")
    run_setup(tmp_path, SYSTEM, UV_DEFAULT_INDEX=f"file://{index}")
    assert [call.split()[0] for call in read_calls(tmp_path)] == ["venv", *["pip"] * node_uv.TRIES, "venv", "pip"]


def test_failed_python_installation_names_python_and_not_an_index(tmp_path: Path, index: Path) -> None:
    with pytest.raises(SetupError, match="`uv venv") as caught:
        run_setup(tmp_path, SYSTEM, UV_DEFAULT_INDEX=f"file://{index}", FAILS="venv")
    assert "UV_PYTHON_INSTALL_MIRROR" in caught.value.hint


@pytest.mark.parametrize(
    ("variables", "backend"),
    [
        ({"PIP_FIND_LINKS": "INDEX/uv"}, "cu126"),  # the usual index: the build is for the driver
        ({"UV_DEFAULT_INDEX": "INDEX"}, ""),  # the user's index: what it has is the build
        ({"PIP_INDEX_URL": "INDEX"}, ""),
        ({"UV_DEFAULT_INDEX": "INDEX", "UV_TORCH_BACKEND": "cu118"}, "cu118"),
    ],
)
def test_build_is_the_drivers_unless_the_user_says_where_torch_comes_from(
    tmp_path: Path, index: Path, variables: dict[str, str], backend: str
) -> None:
    write_nvidia_smi(tmp_path / "smi", "NVIDIA V100, 535.183.01, 7.0")
    write_python(tmp_path / "made", cuda='"12.6"')
    given = {name: value.replace("INDEX", str(index)) for name, value in variables.items()}
    run_setup(tmp_path, f"{tmp_path}/smi:{SYSTEM}", **given)
    assert [line.startswith(f"{backend} ") for line in read_calls(tmp_path)] == [True, True]


def test_torch_that_does_not_work_after_all_fails_the_setup(tmp_path: Path, index: Path) -> None:
    write_nvidia_smi(tmp_path / "smi", "NVIDIA H100, 535.183.01, 9.0")
    write_python(tmp_path / "made", cuda='"13.0"', works=False)
    with pytest.raises(SetupError, match="does not work on NVIDIA H100") as caught:
        run_setup(tmp_path, f"{tmp_path}/smi:{SYSTEM}", UV_DEFAULT_INDEX=str(index))
    assert "UV_TORCH_BACKEND" in caught.value.hint
    assert not (tmp_path / "python/venv/complete").exists()


def test_image_with_torch_gets_what_a_bucket_needs_in_addition(tmp_path: Path, index: Path) -> None:
    path = write_python(tmp_path / "bin/python")
    path.write_text(path.read_text() + '[ "$1" = tell ] && echo "$PYTHONPATH"\ntrue\n')
    run_setup(tmp_path, f"{tmp_path}/bin:{SYSTEM}", UV_DEFAULT_INDEX=str(index), BROKER_CHECKPOINT_DIR="s3://b/c")
    (call,) = read_calls(tmp_path)
    assert "--no-deps" in call and f"--target {tmp_path}/python/extras" in call and "obstore" in call
    done = subprocess.run(
        [tmp_path / "python/bin/python", "tell"], capture_output=True, text=True, env={"PYTHONPATH": "/ours"}
    )
    assert done.stdout.splitlines()[-1] == f"/ours:{tmp_path}/python/extras"


def test_local_cloud_installs_nothing_and_says_what_helps(tmp_path: Path, index: Path) -> None:
    with pytest.raises(SetupError) as caught:
        run_setup(tmp_path, SYSTEM, UV_DEFAULT_INDEX=str(index), BROKER_NODE_DIR="/node")
    assert "pip install 'intercloud-broker[train]'" in caught.value.hint and not read_calls(tmp_path)


# Where uv and packages come from


def test_settings_for_pip_hold_for_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://file/simple\ntrusted-host = a b\n[install]\nfind-links =\n  /w\n  /v\n"
    )
    monkeypatch.setattr(node_uv, "PIP_FILES", (str(tmp_path / "pip.conf"),))
    settings = read_settings({"PIP_EXTRA_INDEX_URL": "https://extra/simple", "PIP_NO_INDEX": "0"})
    assert settings["UV_DEFAULT_INDEX"] == "https://file/simple" and settings["UV_INDEX"] == "https://extra/simple"
    assert settings["UV_FIND_LINKS"] == "/w,/v" and settings["UV_INSECURE_HOST"] == "a b"
    assert settings["UV_INDEX_STRATEGY"] == "unsafe-best-match" and "UV_NO_INDEX" not in settings
    assert list(list_pages(settings)) == [
        "file:///w", "file:///v", "https://extra/simple/uv/", "https://file/simple/uv/",
    ]  # fmt: skip
    assert names_index(settings)
    own = {"UV_DEFAULT_INDEX": "mine=https://own/simple", "PIP_INDEX_URL": "https://pip/simple"}
    monkeypatch.setattr(node_uv, "PIP_FILES", ())
    assert list(list_pages(read_settings(own))) == ["https://own/simple/uv/"]
    assert list(list_pages(read_settings({}))) == ["https://pypi.org/simple/uv/"]
    assert not names_index(read_settings({"PIP_FIND_LINKS": "/w"}))


def test_wheel_with_another_checksum_is_refused_without_showing_the_login(tmp_path: Path) -> None:
    folder = tmp_path / "uv"
    folder.mkdir()
    (folder / "w.whl").write_bytes(b"other")
    settings = {"UV_DEFAULT_INDEX": str(tmp_path), "UV_INDEX": "http://me:secret@127.0.0.1:9/simple"}
    with pytest.raises(SetupError) as caught:
        fetch("w.whl", "0" * 64, settings=settings)
    assert "w.whl has another checksum" in str(caught.value) and "127.0.0.1:9" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_page_of_links_leads_to_the_wheel(tmp_path: Path) -> None:
    """As PyPI's pages: with attributes, escapes and a checksum after the name."""
    (tmp_path / "uv").mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "files/w+1.whl").write_bytes(b"content")
    page = (
        '<html><body><a data-requires-python="&gt;=3.8" href="../files/w%2B1.whl#sha256=00">w+1.whl</a></body></html>'
    )
    (tmp_path / "uv/index.html").write_text(page)
    digest = hashlib.sha256(b"content").hexdigest()
    assert fetch("w+1.whl", digest, settings={"UV_DEFAULT_INDEX": f"file://{tmp_path}"}) == b"content"


def test_trainer_without_torch_says_what_installs_it(tmp_path: Path) -> None:
    """`-S` leaves out the packages of this Python."""
    root = Path(setup.__file__).parents[1]
    code = "import sys, runpy; sys.argv = ['lm']; runpy.run_module('trainers.lm', run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "has no torch" in done.stderr
    assert "setup: python3 -m trainers.setup" in done.stderr and "Traceback" not in done.stderr
