"""`[notify]` in `config.toml`."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.config import Config
from broker.errors import UsageError
from broker.notify.settings import NotifySettings, read_settings, resolve
from broker.types import NotificationKind, NotifySpec


def read(folder: Path, text: str) -> NotifySettings:
    (folder / "config.toml").write_text(text)
    return read_settings(Config(home=folder, owner="me"))


def test_missing_table_sends_no_notification(tmp_path: Path) -> None:
    assert read(tmp_path, "keep_days = 9\n") == NotifySettings()


def test_every_field_of_the_notify_table_is_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '[notify]\non = ["failed"]\nwebhook = "https://x.example/h"\nslack = "env:BROKER_NOTIFY_SLACK"\n'
        'mail = "a@x.example"\n'
        '[notify.smtp]\nhost = "mail.x.example"\nsender = "b@x.example"\nuser = "b"\npassword = "CANARY"\n',
    )
    assert found.spec == NotifySpec(
        on=(NotificationKind.FAILED,), webhook="https://x.example/h", slack="env:BROKER_NOTIFY_SLACK",
        mail=("a@x.example",),
    )  # fmt: skip
    assert found.smtp is not None and found.smtp.password.value == "CANARY"
    assert (found.smtp.port, found.smtp.security, found.smtp.user) == (587, "starttls", "b")
    assert "CANARY" not in repr(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("notify = 3\n", "[notify]: Expected `object`"),
        ('[notify]\non = ["CANARY"]\n', "Invalid enum value"),
        ('[notify]\nwebhok = "https://CANARY"\n', "unknown field `webhok`"),
        ('[notify]\nwebhook = "CANARY"\n', "`webhook` must be a URL"),
        ('[notify]\nslack = "env:CANARY"\n', "`slack` must be a URL, or `env:BROKER_NOTIFY_...`"),
        ('[notify]\nmail = "CANARY"\n', "`mail` must be an address"),
        ('[notify]\nmail = "a@x.example"\n', "require a mail server"),
        (
            '[notify.smtp]\nhost = "h"\nsender = "s"\nsecurity = "none"\npassword = "CANARY"\n',
            "the password would be sent to `h` in clear text",
        ),
    ],
)
def test_invalid_settings_are_explained(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert expected in caught.value.message
    if "enum" not in expected:
        assert "CANARY" not in caught.value.message


def test_variables_are_read_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_NOTIFY_SLACK", "https://x.example/T")
    assert resolve("env:BROKER_NOTIFY_SLACK") == "https://x.example/T"
    assert resolve("https://y.example/") == "https://y.example/"
    monkeypatch.delenv("BROKER_NOTIFY_SLACK")
    with pytest.raises(UsageError, match="BROKER_NOTIFY_SLACK is not set"):
        resolve("env:BROKER_NOTIFY_SLACK")


def test_other_variables_cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_SECRET_KEY", "CANARY")
    assert resolve("env:BROKER_SECRET_KEY") == "env:BROKER_SECRET_KEY"
