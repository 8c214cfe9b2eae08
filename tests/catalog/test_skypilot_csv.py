"""SkyPilot's catalog files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.catalog.skypilot_csv import parse_vms
from broker.errors import SourceError
from tests.catalog.market import read


def test_gcp_accelerators_are_added_to_the_machines_that_carry_them() -> None:
    offers, faults = parse_vms(read("gcp_vms.csv").decode(), cloud="gcp", file="vms.csv")
    assert not faults
    found = {each.instance_type: each for each in offers}
    assert set(found) == {"a2-highgpu-1g", "n1-standard-8", "n1-standard-8+1xT4", "e2-standard-4"}
    a100 = found["a2-highgpu-1g"]
    assert a100.ondemand_usd_hour == pytest.approx(0.73948 + 2.933908)
    assert a100.spot_usd_hour == pytest.approx(0.36975 + 1.46)
    assert (a100.accelerator, a100.accelerator_memory_gib, a100.vcpus) == ("A100", 40, 12)
    assert found["n1-standard-8"].accelerator is None, "a machine without its accelerator is sold too"


def test_bad_rows_are_named_by_line_and_the_others_are_kept() -> None:
    rows = ["a,1.0,r1,", "b,cheap,r1,", "c,-1,r1,", "d,1.0,,", ",2.0,r1,", "e,nan,r1,", "f,2,r2,"]
    text = "\n".join(["InstanceType,Price,Region,AcceleratorName", *rows, ""])
    offers, faults = parse_vms(text, cloud="x", file="x/vms.csv")
    assert [each.instance_type for each in offers] == ["a", "f"]
    assert [fault.line for fault in faults] == [3, 4, 5, 6, 7]
    assert str(faults[0]) == "x/vms.csv:3: `Price` is no number: `cheap`"


def test_a_file_of_something_else_is_refused() -> None:
    with pytest.raises(SourceError, match="no column Region"):
        parse_vms("name,Price\nx,1\n", cloud="x", file="f")


@given(st.text(max_size=300))
def test_any_text_is_offers_faults_or_a_source_error(text: str) -> None:
    try:
        offers, _ = parse_vms("InstanceType,Price,Region,SpotPrice,GpuInfo\n" + text, cloud="x", file="f")
    except SourceError:
        return
    assert all((each.ondemand_usd_hour or each.spot_usd_hour or 0) > 0 for each in offers)
