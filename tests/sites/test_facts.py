"""Names of cards, and files of what was detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.sites.facts import Machine, name_accelerator, read_facts, write_facts


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "RTXA6000"),
        ("a100", "A100"),
        ("nvidia_a100-sxm4-80gb", "A100-80GB"),
        ("nvidia_h100_80gb_hbm3", "H100"),
        ("tesla_v100-sxm2-16gb", "V100"),
        ("nvidia_geforce_rtx_3090", "RTX3090"),
        ("2080ti", "RTX2080TI"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080TI"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX1080TI"),
        ("1080", "GTX1080"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("Quadro RTX 6000", "RTX6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000"),
        ("a100_1g.5gb", "A100-1G.5GB"),
        ("1g.5gb", "1G.5GB"),
        ("A6000", "A6000"),
        ("MI300X", "MI300X"),
    ],
)
def test_card_gets_the_price_books_name(text: str, name: str) -> None:
    assert name_accelerator(text) == name


def test_facts_are_read_as_written(tmp_path: Path) -> None:
    facts = {"lab/a": Machine(vcpus=8, memory_gib=31.2, accelerator="T4", accelerator_count=2)}
    write_facts(tmp_path / "sites" / "ssh.json", facts)
    assert read_facts(tmp_path / "sites" / "ssh.json") == facts


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b'{"a": {"vcpus": 1}}', b"\xff"])
def test_damaged_facts_count_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ssh.json").write_bytes(content)
    assert read_facts(tmp_path / "ssh.json") == {}
