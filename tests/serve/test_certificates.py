"""When a certificate for clients expires: how it is read, and who is warned."""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from broker.cli.serve import _warn_of_expiry
from broker.runtime.credentials import make_credential
from broker.serve.certificates import WARN_S, find_expiry_s, read_expiry_s
from broker.serve.credentials import CERTIFICATE, ListenerFiles
from broker.serve.wording import describe_service_event, warn_of_expiry
from broker.types import ServiceEventKind
from tests.cli.test_serve_top import make_line
from tests.serve.test_controller import World
from tests.serve.test_credentials import replace_file
from tests.serve.test_tcp_path import make_tls

DAY_S = 86400.0


def read_by_library(pem: str) -> float:
    return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc.timestamp()


@pytest.mark.parametrize("years", [1, 40])  # RFC 5280: times up to 2049 have two digits of the year, later ones four
def test_expiry_is_that_of_the_first_certificate_of_a_file(tmp_path: Path, years: int) -> None:
    first = make_credential("a" * 60, valid=timedelta(days=365 * years)).value  # lengths above 127 take several bytes
    path = tmp_path / "chain.pem"
    path.write_text(first + make_credential("authority", valid=timedelta(days=3)).value)
    expected = read_by_library(CERTIFICATE + first.partition(CERTIFICATE)[2])
    assert read_expiry_s(path) == expected
    assert (datetime.fromtimestamp(expected, UTC).year >= 2050) is (years == 40)


def test_file_without_a_certificate_has_no_expiry(tmp_path: Path) -> None:
    path = tmp_path / "tls.pem"
    assert read_expiry_s(path) is None
    for text in ("", "not a certificate", f"{CERTIFICATE}\nAAAA\n-----END CERTIFICATE-----", f"{CERTIFICATE}\n\xff"):
        path.write_text(text)
        assert read_expiry_s(path) is None


def test_damaged_certificate_raises_only_what_its_reader_expects() -> None:
    pem = make_credential("a").value
    der = ssl.PEM_cert_to_DER_cert(CERTIFICATE + pem.partition(CERTIFICATE)[2])
    for at in range(len(der)):
        for damaged in (der[:at], der[:at] + b"\xff" + der[at + 1 :]):
            with suppress(ValueError, IndexError):
                find_expiry_s(damaged)


def test_expiry_in_use_is_the_old_one_until_new_files_fit_together(tmp_path: Path) -> None:
    tls = make_tls(tmp_path)
    files, before_s = ListenerFiles(tls), read_expiry_s(Path(tls.certificate_path))
    (damaged := tmp_path / "damaged.pem").write_text("not a certificate")
    replace_file(tls.certificate_path, str(damaged))
    assert not files.are_renewed() and files.ends_s == before_s is not None
    (renewed := tmp_path / "renewed.pem").write_text(make_credential("bed", valid=timedelta(days=90)).value)
    replace_file(tls.certificate_path, str(renewed))
    assert files.are_renewed() and files.ends_s is not None
    assert files.ends_s > before_s + 80 * DAY_S


@pytest.mark.parametrize(
    ("rest_s", "said"),
    [
        (None, ""),
        (WARN_S + 1, ""),
        (9 * DAY_S, "the certificate for clients expires in 9d 0h: renew the files of `tls`"),
        (-3600.0, "the certificate for clients expired 1h 00m ago: renew the files of `tls`"),
    ],
)
def test_warning_begins_two_weeks_before_the_end(
    rest_s: float | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_s = None if rest_s is None else 1e6 + rest_s
    assert warn_of_expiry(ends_s, 1e6) == said
    line = make_line()
    assert line.load is not None
    _warn_of_expiry(replace(line, load=replace(line.load, certificate_ends_s=ends_s)), 1e6, indent="")
    assert capsys.readouterr().out == (f"service llm: {said}\n" if said else "")


def test_controller_records_each_certificate_that_expires_once(tmp_path: Path) -> None:
    world = World(tmp_path)

    def list_warnings() -> list[str]:
        events = world.store.services.list_events("web")
        return [describe_service_event(each) for each in events if each.kind is ServiceEventKind.CERTIFICATE_EXPIRES]

    world.certificate_ends_s = world.clock.now + 20 * DAY_S
    world.settle(5)
    assert list_warnings() == []
    world.clock.now += 10 * DAY_S
    world.settle(5)
    world.controller = world.make_controller()
    world.settle(5)
    expected = "the certificate for clients expires at 1970-02-01 13:46 UTC: renew the files of `tls`"
    assert list_warnings() == [expected]
    world.certificate_ends_s = world.clock.now + 90 * DAY_S
    world.settle(5)
    world.clock.now += 80 * DAY_S
    world.settle(5)
    assert len(list_warnings()) == 2
