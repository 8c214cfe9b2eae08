"""Rebuild the shipped book for a release: `python -m broker.catalog.rebuild FACTS_DIR [--cached]`.

Fetches every cloud of the shipped book from its sources, by the rules of `broker catalog update`, writes the accepted
offers as CSV facts into FACTS_DIR, compiles them, and writes the table of origins next to the archive. `--cached` skips
the network: the same FACTS_DIR gives the same bytes. A cloud whose sources fail keeps its prices and their dates.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import hashlib
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from broker.catalog.book import Book
from broker.catalog.bundle import SHIPPED, open_book
from broker.catalog.compile import CLOUDS_FILE, compile_book
from broker.catalog.refresh import CloudRefresh, load_sources, refresh_book
from broker.catalog.sources.base import Get, PriceSource

ORIGINS = SHIPPED.with_name("ORIGINS.md")
OFFER_COLUMNS = (
    "cloud", "region", "zone", "instance_type", "arch", "vcpus", "memory_gib", "accelerator", "accelerator_count",
    "accelerator_memory_gib", "ondemand_usd_hour", "spot_usd_hour", "interruption_band", "ondemand_as_of", "spot_as_of",
)  # fmt: skip
OFFERS = """
SELECT t.cloud, r.text, z.text, t.instance_type, t.arch, t.vcpus, t.memory_gib, t.accelerator, t.accelerator_count,
       t.accelerator_memory_gib, o.ondemand_usd_hour, o.spot_usd_hour, o.interruption_band, o.ondemand_as_of,
       o.spot_as_of
FROM types t JOIN offers o ON o.type = t.id JOIN texts r ON r.id = o.region LEFT JOIN texts z ON z.id = o.zone
WHERE t.cloud = ? ORDER BY 4, 2, 3, 11, 12, 6, 7
"""
DERIVED = """
SELECT DISTINCT t.cloud, r.text, t.instance_type, 'ondemand' FROM types t JOIN offers o ON o.type = t.id
JOIN texts r ON r.id = o.region WHERE o.is_estimated ORDER BY 1, 2, 3
"""
ACCELERATORS = (
    "SELECT name, memory_gib, bf16_dense_tflops, fp32_tflops, memory_bandwidth_gbs, nvlink_gbs FROM accelerators "
    "ORDER BY 1"
)
EGRESS = "SELECT cloud, from_region, target, usd_per_gb FROM egress ORDER BY 1, 2, 3"


def fetch_facts(
    folder: Path, sources: Mapping[str, PriceSource], get: Get, *, now_s: float, note: Callable[[str], None]
) -> Sequence[CloudRefresh]:
    """Fetch all clouds of the shipped book and write the facts; return the result of each cloud."""
    with tempfile.TemporaryDirectory() as cache:
        book = open_book(Path(cache))
        reports = refresh_book(
            Path(cache), book, book.clouds, sources=sources, get=get, now_s=now_s,
            on_cloud=lambda cloud, source: note(f"{cloud}: querying {source} ..."),
        )  # fmt: skip
        write_facts(open_book(Path(cache)), folder)
    return reports


def write_facts(book: Book, folder: Path) -> None:
    """Write a book as the CSV facts that `compile_book` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(":memory:")
    book.copy_to(database)
    for cloud in book.clouds:
        _write_rows(folder / f"offers_{cloud}.csv", OFFER_COLUMNS, database.execute(OFFERS, (cloud,)))
    _write_rows(folder / "derived.csv", ("cloud", "region", "instance_type", "column"), database.execute(DERIVED))
    figures = ("accelerator", "memory_gib", "bf16_dense_tflops", "fp32_tflops", "memory_bandwidth_gbs", "nvlink_gbs")
    _write_rows(folder / "accelerators.csv", figures, database.execute(ACCELERATORS))
    _write_rows(folder / "egress.csv", ("cloud", "from_region", "to", "usd_per_gb"), database.execute(EGRESS))
    facts = [book.get_facts(cloud) for cloud in book.clouds]
    rows = [(each.cloud, each.ondemand_as_of, each.spot_as_of, each.source) for each in facts]
    _write_rows(folder / CLOUDS_FILE, ("cloud", "ondemand_as_of", "spot_as_of", "source"), rows)
    database.close()


def describe_origins(folder: Path) -> str:
    """Return the table of origins, Markdown: source, dates, number of offers and SHA-256 of each cloud's facts."""
    lines = [
        "# Origins of the shipped prices", "",
        "Written by `python -m broker.catalog.rebuild`. The checksum is that of the cloud's CSV facts.", "",
        "| cloud | source | on-demand of | spot of | offers | SHA-256 |", "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    with (folder / CLOUDS_FILE).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            body = (folder / f"offers_{row['cloud']}.csv").read_bytes()
            count = len(body.splitlines()) - 1
            cells = (
                row["cloud"], row["source"], row["ondemand_as_of"], row["spot_as_of"], f"{count:,}",
                f"`{hashlib.sha256(body).hexdigest()}`",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(["" if value is None else value for value in row] for row in rows)


def main(arguments: list[str]) -> int:
    """Run the program; return 1 if a cloud kept its old prices."""
    from broker.catalog.http_client import HttpGet
    from broker.clock import SystemClock

    parser = argparse.ArgumentParser(prog="python -m broker.catalog.rebuild", description="Rebuild the shipped book.")
    parser.add_argument("folder", type=Path, help="folder of the CSV facts")
    parser.add_argument("--cached", action="store_true", help="use the facts of the folder; fetch nothing")
    parser.add_argument("--output", type=Path, default=SHIPPED, help="archive to write")
    given = parser.parse_args(arguments)
    reports: Sequence[CloudRefresh] = ()
    if not given.cached:
        clock = SystemClock()
        get = HttpGet(lambda wait_s: asyncio.run(clock.sleep(wait_s)))
        reports = fetch_facts(given.folder, load_sources(), get, now_s=clock.now_s(), note=_note)
    count = compile_book(given.folder, given.output)
    given.output.with_name(ORIGINS.name).write_text(describe_origins(given.folder), encoding="utf-8")
    for each in reports:
        result = f"old prices kept: {each.error}" if each.error else f"{each.offers:,} offers, {each.source}"
        _note(f"{each.cloud}: {result}")
    _note(f"{count:,} offers -> {given.output} ({given.output.stat().st_size:,} bytes)")
    return 1 if any(each.error for each in reports) else 0


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
