"""Logins that a node finds by itself, in the order in which AWS's and Google's own libraries look."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from hypothesis import given
from hypothesis import strategies as st

from broker.agent import agent_login

KEYS = "aws_access_key_id = FILE\naws_secret_access_key = s\naws_session_token = t\n"
PROCESS = {"Version": 1, "AccessKeyId": "PROCESS", "SecretAccessKey": "s", "SessionToken": "t"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(agent_login, "METADATA", "http://127.0.0.1:9")  # no machine's role
    (tmp_path / ".aws").mkdir()
    return tmp_path


def test_variables_beat_files_and_files_beat_the_machine(home: Path) -> None:
    (home / ".aws/credentials").write_text(f"[default]\n{KEYS}[other]\n{KEYS.replace('FILE', 'OTHER')}")
    keys = {"AWS_ACCESS_KEY_ID": "ENV", "AWS_SECRET_ACCESS_KEY": "s"}
    for variables, found in ((keys, "ENV"), ({}, "FILE"), ({"AWS_PROFILE": "other"}, "OTHER")):
        assert agent_login.find_s3_login({"HOME": str(home), **variables})["key"] == found
    (home / ".aws/credentials").write_text("")
    (home / ".aws/config").write_text(f"[profile other]\n{KEYS}")
    assert agent_login.find_s3_login({"HOME": str(home), "AWS_PROFILE": "other"})["token"] == "t"
    with pytest.raises(agent_login.Refused, match="no login for S3"):
        agent_login.find_s3_login({"HOME": str(home)})


def test_process_is_run_without_a_shell_each_time(home: Path) -> None:
    file, config = home / "a folder.json", home / "config"
    file.write_text(json.dumps(PROCESS))
    config.write_text(f'[default]\ncredential_process = cat "{file}"\n')
    variables = {"HOME": str(home), "AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(config)}
    assert agent_login.find_s3_login(variables) == {"key": "PROCESS", "secret": "s", "token": "t"}
    file.write_text(json.dumps({**PROCESS, "AccessKeyId": "RENEWED"}))
    assert agent_login.find_s3_login(variables)["key"] == "RENEWED"
    for broken in (f'cat "{file}" | tee x', "cat /nonexistent", "/nonexistent/program", "echo {}"):
        config.write_text(f"[default]\ncredential_process = {broken}\n")
        with pytest.raises(agent_login.Refused, match="credential_process"):
            agent_login.find_s3_login(variables)


@pytest.mark.parametrize("bits", [1024, 2048, 4096])
def test_signature_is_the_one_that_others_verify(bits: int) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=bits)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    for text in (b"", b"head.claims", bytes(range(256))):
        key.public_key().verify(agent_login.sign(text, pem), text, padding.PKCS1v15(), hashes.SHA256())


def test_key_with_foreign_characters_is_refused() -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    lines = (
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        .decode()
        .splitlines()
    )
    assert agent_login.read_rsa_key("\n".join(lines))[0] == key.public_key().public_numbers().n
    with pytest.raises(ValueError, match="base64"):
        agent_login.read_rsa_key("\n".join([lines[0], "!!!!", *lines[1:]]))


@pytest.mark.parametrize("content", ['{"type": "service_account"}', '{"type": "authorized_user"}'])
def test_google_login_without_its_fields_is_reported_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key.json"
    path.write_text(content)
    with pytest.raises(agent_login.Refused, match=rf"`{path}` is damaged \(KeyError\)"):
        agent_login.find_google_token({"GOOGLE_APPLICATION_CREDENTIALS": str(path), "HOME": str(tmp_path)})


def test_credentials_file_that_is_no_object_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    path.write_text("[]")
    with pytest.raises(agent_login.Refused, match="is damaged"):
        agent_login.find_google_token({"GOOGLE_APPLICATION_CREDENTIALS": str(path), "HOME": str(tmp_path)})


@given(st.binary(max_size=40))
def test_each_damage_of_a_key_has_its_own_error(content: bytes) -> None:
    """Whatever the file holds, the error is of the two kinds that the caller turns into a line."""
    import base64

    pem = f"-----BEGIN PRIVATE KEY-----\n{base64.b64encode(content).decode()}\n-----END PRIVATE KEY-----\n"
    with pytest.raises((ValueError, IndexError)):
        agent_login.read_rsa_key(pem)


def test_copy_from_another_region_asks_s3_where_the_bucket_is(tmp_path: Path) -> None:
    """A node runs it as a program of its own; a variable may name the region of other work."""
    program = Path(agent_login.__file__).parents[1] / "storage" / "node_objects.py"
    script = f"""
import runpy, sys, os
sys.argv = ["x"]
module = runpy.run_path({str(program)!r}, run_name="module")
module["find_s3_options"].__globals__["find_region"] = lambda bucket: "eu-central-1" if bucket == "b" else None
assert module["find_s3_options"]("b") == {{"region": "eu-central-1"}}, module["find_s3_options"]("b")
assert module["find_s3_options"]("c") == {{}}
os.environ["AWS_REGION"] = "us-west-2"
assert module["find_s3_options"]("b") == {{"region": "eu-central-1"}}
assert module["find_s3_options"]("c") == {{}}, "the library reads the variable"
"""
    subprocess.run(["python3", "-c", script], check=True, env={"PATH": "/usr/bin:/bin:/usr/local/bin"})
