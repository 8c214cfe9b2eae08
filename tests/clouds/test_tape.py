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
        ("Arn=arn%3Aaws%3Aiam%3A%3A123456789012%3Auser%2Fjane.doe&Version=1", "123456789012"),
        ("Arn=arn%3Aaws%3Aiam%3A%3A123456789012%3Auser%2Fjane.doe&Version=1", "jane.doe"),
        ("Arn=arn%3Aaws%3Asts%3A%3A123456789012%3Aassumed-role%2FAdmin%2Fjane.doe", "jane.doe"),
        ("projects/98765432101/global/networks/default", "98765432101"),
        ("https%3A%2F%2Fgoogle%2Fprojects%2F9876543210123%2Fzones", "9876543210123"),
        ("<SecretAccessKey>wJalrXUtnFEMI/K7MDENG</SecretAccessKey>", "wJalrXUtnFEMI"),
        ('{"SessionToken": "FwoGZXIvYXdzEBYaD"}', "FwoGZXIvYXdzEBYaD"),
        ("not authorized. Encoded authorization failure message: 4GIOHlTkIaWHQD0Q", "4GIOHlTkIaWHQD0Q"),
        ('"email": "train@acme-research.iam.gserviceaccount.com"', "acme-research"),
        ("CidrIp=8.8.4.4%2F32", "8.8.4.4"),
        ("<cidrIpv6>2a01:4f8:c0c:1234::9/128</cidrIpv6>", "c0c"),
        ("CidrIpv6=2a01%3A4f8%3Ac0c%3A1234%3A%3A9%2F128", "c0c"),
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


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.7",
        "::/0",
        "fe80::1",
        "12:30:45",
        "a1:b2:c3:d4",
        "arn:aws:s3:::b",
        "999.1.2.3",
        "i-0123456789abcdef0",
        "m5.large",
        "1.2.3",
    ],
)
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
