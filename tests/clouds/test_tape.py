from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.clouds.tape import Exchange, Scrubber, Tape
from broker.errors import UsageError
from tests.testbed.replay import read_tape


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("Action=RunInstances&UserData=IyEvYmluL3No&MinCount=1", "IyEvYmluL3No"),
        ("LaunchTemplateData.UserData=IyEvYmluL3No", "IyEvYmluL3No"),
        ("<userData>IyEv\nYmluL3No</userData>", "IyEv\nYmluL3No"),
        (json.dumps({"items": [{"key": "ssh-keys", "value": "me:ssh-ed25519 AAAA\n"}]}), "AAAA"),
        (json.dumps({"value": 'echo "hush"', "key": "startup-script"}), "hush"),
        ("<Arn>arn:aws:iam::123456789012:user/jane.doe</Arn>", "123456789012"),
        ("<Arn>arn:aws:iam::123456789012:user/jane.doe</Arn>", "jane.doe"),
        ("<UserId>AIDAJQABLZS4A3QDU576Q</UserId>", "AIDAJQABLZS4A3QDU576Q"),
        ('"email": "train@acme-research.iam.gserviceaccount.com"', "acme-research"),
        ("CidrIp=8.8.4.4%2F32", "8.8.4.4"),
        ("https://b.s3.amazonaws.com/k?X-Amz-Signature=deadbeef&x=1", "deadbeef"),
        ("/compute/v1/projects/acme-research/zones", "acme-research"),
    ],
)
def test_private_texts_do_not_reach_a_recording(text: str, private: str) -> None:
    assert private not in Scrubber({"acme-research": "project-1"}).scrub(text)


def test_the_same_text_gets_the_same_placeholder_and_another_one_another() -> None:
    scrubber = Scrubber()
    first = scrubber.scrub("123456789012 from 8.8.4.4 as " + "ab" * 16)
    assert scrubber.scrub("123456789012 from 8.8.4.4 as " + "ab" * 16) == first
    assert scrubber.scrub("210987654321 from 9.9.9.9 as " + "cd" * 16).split() != first.split()
    assert scrubber.scrub(first) == first, "a placeholder stays as it is"


@pytest.mark.parametrize("text", ["10.0.0.7", "172.31.5.9", "999.1.2.3", "i-0123456789abcdef0", "m5.large", "1.2.3"])
def test_text_without_private_data_is_kept(text: str) -> None:
    assert Scrubber().scrub(text) == text


def test_a_recording_is_read_as_observed(tmp_path: Path) -> None:
    tape = Tape(tmp_path / "tape.jsonl", Scrubber())
    heard = Exchange(
        service="ec2", operation="RunInstances", region="us-east-1", request="a=1", status=200, answer="<a/>"
    )
    tape.add_exchange(heard)
    tape.close()
    assert read_tape(tmp_path / "tape.jsonl") == [heard]


def test_a_recording_never_overwrites_a_file(tmp_path: Path) -> None:
    (tmp_path / "tape.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="File exists"):
        Tape(tmp_path / "tape.jsonl", Scrubber())
    assert (tmp_path / "tape.jsonl").read_text() == "mine"
