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


def write_gpu(name: str, count: int, size_mib: float) -> str:
    return f"\"{{'Gpus': [{{'Name': '{name}', 'Count': {count}, 'MemoryInfo': {{'SizeInMiB': {size_mib}}}}}]}}\""


def test_memory_of_an_accelerator_is_read_in_every_unit_of_the_files() -> None:
    rows = [
        f"one,RTX4090,1,{write_gpu('RTX4090', 1, 24576)}",  # MiB of one
        f"eight,RTX4090,8,{write_gpu('RTX4090', 8, 8 * 24564)}",  # MiB of all eight
        f"two,A6000,2,{write_gpu('A6000', 2, 48)}",  # GiB in the field for MiB
        f"four,H100,4,{write_gpu('H100', 4, 81920)}",  # MiB of one
        f"alone,B200,8,{write_gpu('B200', 8, 8 * 183359)}",  # MiB of all, without an offer of one to compare with
        "silent,T4,1,T4",
    ]
    text = "InstanceType,AcceleratorName,AcceleratorCount,GpuInfo,Price,Region\n"
    offers, faults = parse_vms(text + "".join(f"{row},1.0,r\n" for row in rows), cloud="vast", file="vms.csv")
    assert not faults
    found = {each.instance_type: each.accelerator_memory_gib for each in offers}
    expected = {"one": 24, "eight": 24, "two": 48, "four": 80, "alone": 179.1, "silent": 0}
    assert found == pytest.approx(expected, abs=0.1)


def test_gcp_families_that_always_have_accelerators_are_not_sold_as_bare_machines() -> None:
    head = (
        "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice"
    )
    row = "a3-edgegpu-8g,208.0,1872.0,,,,us-east4,us-east4-a,9.46,2.16"
    offers, _ = parse_vms(f"{head}\n{row}\n", cloud="gcp", file="vms.csv")
    assert offers == []


def test_a_tpu_slice_is_an_offer_of_its_chips() -> None:
    head = (
        "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice"
    )
    names = ("tpu-v5litepod-8", "tpu-v3-8", "tpu-v5p-128", "tpu-v6e-4")
    rows = "".join(f",,,{name},1,{name},us-east1,us-east1-d,9.6,4.8\n" for name in names)
    offers, _ = parse_vms(f"{head}\n{rows}", cloud="gcp", file="vms.csv")
    assert [(each.instance_type, each.accelerator, each.accelerator_count) for each in offers] == [
        ("tpu-v5litepod-8", "TPU-v5e", 8),
        ("tpu-v3-8", "TPU-v3", 4),
        ("tpu-v5p-128", "TPU-v5p", 64),
        ("tpu-v6e-4", "TPU-v6e", 4),
    ]


def test_bad_rows_are_named_by_line_and_the_others_are_kept() -> None:
    rows = ["a,1.0,r1,", "b,cheap,r1,", "c,-1,r1,", "d,1.0,,", ",2.0,r1,", "e,nan,r1,", "f,2,r2,"]
    text = "\n".join(["InstanceType,Price,Region,AcceleratorName", *rows, ""])
    offers, faults = parse_vms(text, cloud="x", file="x/vms.csv")
    assert [each.instance_type for each in offers] == ["a", "f"]
    assert [fault.line for fault in faults] == [3, 4, 5, 6, 7]
    assert str(faults[0]) == "x/vms.csv:3: `Price` is not a number: `cheap`"


def test_a_file_of_another_format_is_refused() -> None:
    with pytest.raises(SourceError, match="missing column Region"):
        parse_vms("name,Price\nx,1\n", cloud="x", file="f")


@given(st.text(max_size=300))
def test_any_text_yields_offers_faults_or_a_source_error(text: str) -> None:
    try:
        offers, _ = parse_vms("InstanceType,Price,Region,SpotPrice,GpuInfo\n" + text, cloud="x", file="f")
    except SourceError:
        return
    assert all((each.ondemand_usd_hour or each.spot_usd_hour or 0) > 0 for each in offers)
