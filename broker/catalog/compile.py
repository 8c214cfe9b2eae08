"""Compile the price book from CSV facts: `python -m broker.catalog.compile FACTS_DIR [OUTPUT]`.

Reads offers_*.csv, derived.csv (the on-demand prices that are estimates), accelerators.csv and egress.csv; the same
facts give the same bytes.
"""

from __future__ import annotations

import csv
import lzma
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from broker.catalog.schema import ARCHIVE, SCHEMA_VERSION, TABLES
from broker.catalog.staleness import CloudFacts
from broker.catalog.writer import BookWriter
from broker.types import Offer

# Date of the oldest figure that a cloud's prices depend on: (on-demand, spot). The facts' source table names the origin
# of each; catalogues without a date count from the day they were read.
PRICES_AS_OF = {
    "aws": ("2025-04-04", "2025-06-28"),
    "azure": ("2026-06-18", "2024-09-28"),
    "gcp": ("2026-08-03", "2026-08-03"),
}
ONDEMAND_AS_OF = {("aws", "us-east-1"): "2026-07-20"}  # a region whose list is newer than the rest of its cloud
READ_ON = "2026-11-21"
SOURCE = "shipped with broker"
CLOUDS_FILE = "clouds.csv"  # dates and sources by cloud, from `broker.catalog.rebuild`; without it, those above apply


def main(arguments: list[str]) -> int:
    """Compile CSV files into the archive that ships with broker; return the exit code."""
    if len(arguments) not in (1, 2):
        sys.stderr.write("usage: python -m broker.catalog.compile FACTS_DIR [OUTPUT]\n")
        return 2
    output = Path(arguments[1]) if len(arguments) == 2 else Path(__file__).parent / "data" / ARCHIVE
    count = compile_book(Path(arguments[0]), output)
    sys.stderr.write(f"{count:,} offers -> {output} ({output.stat().st_size:,} bytes)\n")
    return 0


def compile_book(facts: Path, output: Path) -> int:
    """Write the compressed book and return its number of offers. A row without any price is an error."""
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA page_size = 4096")
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    database.executescript(TABLES)
    estimated = {
        (row["cloud"], row["region"], row["instance_type"])
        for row in _read_rows(facts / "derived.csv")
        if row["column"] == "ondemand"
    }
    writer = BookWriter(database)
    dates = {row["cloud"]: row for row in _read_rows(facts / CLOUDS_FILE)} if (facts / CLOUDS_FILE).exists() else {}
    clouds: dict[str, CloudFacts] = {}
    count = 0
    for path in sorted(facts.glob("offers_*.csv")):
        for row in _read_rows(path):
            is_estimated = (row["cloud"], row["region"], row["instance_type"]) in estimated
            facts_of = clouds.setdefault(row["cloud"], _find_facts(row["cloud"], dates))
            writer.add_offer(_make_offer(row, is_estimated=is_estimated), arch=row["arch"], facts=facts_of)
            count += 1
    for row in _read_rows(facts / "accelerators.csv"):
        figures = ("bf16_dense_tflops", "fp32_tflops", "memory_bandwidth_gbs", "nvlink_gbs")
        values = [row["accelerator"], float(row["memory_gib"]), *(_number(row[name]) for name in figures)]
        database.execute("INSERT INTO accelerators VALUES (?,?,?,?,?,?)", values)
    for row in _read_rows(facts / "egress.csv"):
        values = [row["cloud"], row["from_region"], row["to"], float(row["usd_per_gb"])]
        database.execute("INSERT INTO egress VALUES (?,?,?,?)", values)
    for _, each in sorted(clouds.items()):
        database.execute(
            "INSERT INTO clouds VALUES (?,?,?,?)", (each.cloud, each.ondemand_as_of, each.spot_as_of, each.source)
        )
    database.commit()
    database.execute("VACUUM")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(lzma.compress(database.serialize(), preset=9 | lzma.PRESET_EXTREME))
    return count


def _find_facts(cloud: str, dates: Mapping[str, Mapping[str, str]]) -> CloudFacts:
    if row := dates.get(cloud):
        ondemand, spot = row["ondemand_as_of"], row["spot_as_of"]
        return CloudFacts(cloud=cloud, ondemand_as_of=ondemand, spot_as_of=spot, source=SOURCE)
    ondemand, spot = PRICES_AS_OF.get(cloud, (READ_ON, READ_ON))
    return CloudFacts(cloud=cloud, ondemand_as_of=ondemand, spot_as_of=spot, source=SOURCE)


def _make_offer(row: dict[str, str], *, is_estimated: bool) -> Offer:
    return Offer(
        cloud=row["cloud"],
        region=row["region"],
        zone=row["zone"] or None,
        instance_type=row["instance_type"],
        vcpus=float(row["vcpus"] or 0),
        memory_gib=float(row["memory_gib"] or 0),
        accelerator=row["accelerator"] or None,
        accelerator_count=float(row["accelerator_count"] or 0),
        accelerator_memory_gib=float(row["accelerator_memory_gib"] or 0),
        ondemand_usd_hour=_number(row["ondemand_usd_hour"]),
        spot_usd_hour=_number(row["spot_usd_hour"]),
        interruption_band=_number(row["interruption_band"]),
        is_estimated=is_estimated,
        as_of=row["ondemand_as_of"]
        if "ondemand_as_of" in row
        else ONDEMAND_AS_OF.get((row["cloud"], row["region"]), ""),
        spot_as_of=row.get("spot_as_of", ""),
    )


def _read_rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _number(text: str) -> float | None:
    return float(text) if text else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
