"""How long the price book takes: `python -m tests.bench.bench_catalog [--rounds N]`. No test.

Times are of the processor, least of the rounds, so that a busy machine doesn't show; each row's ratio is to the plain
way of doing the same in the same run.
"""

from __future__ import annotations

import argparse
import csv
import io
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from broker.catalog import book as book_module
from broker.catalog.atomic_replace import replace_clouds
from broker.catalog.book import Book
from broker.catalog.bundle import SHIPPED, open_book
from broker.catalog.history import remember_changes
from broker.catalog.skypilot_csv import parse_vms
from broker.task.loader import load_tasks_text
from broker.types import Offer, Task

QUERIES = (
    "{accelerators: A100:8, use_spot: true}",
    "{accelerators: [A100:8, H100:8, T4:1]}",
    "{cpus: 4, use_spot: true}",
    "{cpus: 4+, memory: 16+}",
    "{cpus: 96+, memory: 700+}",
    "{infra: aws/us-east-1, cpus: 8+}",
    "{instance_type: p4d.24xlarge}",
)
COLUMNS = (
    "InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "Price", "SpotPrice", "Region",
    "AvailabilityZone",
)  # fmt: skip


def measure(run: Callable[[], object], rounds: int) -> float:
    """Return the least processor milliseconds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best * 1000


def show(name: str, ms: float, *, count: int | None = None, plain_ms: float | None = None) -> None:
    counted = f"{count:,}" if count is not None else ""
    ratio = f"{plain_ms / ms:.1f} x" if plain_ms else ""
    print(f"{name:<52}{counted:>9}{ms:>10.2f} ms{ratio:>9}", flush=True)


def find_plainly(book: Book, task: Task) -> list[Offer]:
    """Run one query without hints to SQLite and make offers the usual way: the baseline for the book's own ways."""
    where, values = "1", list[object]()
    (resources,) = task.resources[:1]
    if resources.accelerator is None and resources.instance_type is None:
        where += " AND t.accelerator IS NULL AND t.arch = 'x86_64'"
    for column, value in (
        ("t.accelerator", resources.accelerator), ("t.accelerator_count", resources.accelerator_count),
        ("t.instance_type", resources.instance_type),
        ("t.cloud", resources.cloud), ("r.text", resources.region),
    ):  # fmt: skip
        if value:
            where, values = f"{where} AND {column} = ?", [*values, value]
    for column, quantity in (("t.vcpus", resources.cpus), ("t.memory_gib", resources.memory_gib)):
        if quantity:
            where = f"{where} AND {column} {'>=' if quantity.is_minimum else '='} ?"
            values.append(quantity.value)
    price = "spot_usd_hour" if resources.use_spot else "ondemand_usd_hour"
    query = f"{book_module._SELECT} WHERE {where} AND o.{price} IS NOT NULL ORDER BY o.{price} LIMIT 1000"
    names = [field.name for field in fields(Offer)]
    rows = book._database.execute(query, values)
    return [Offer(**dict(zip(names, row, strict=True))) for row in rows]


def bench_queries(book: Book, rounds: int) -> None:
    for text in QUERIES:
        (task,) = load_tasks_text(f"resources: {text}\nrun: x", "t.yaml")
        ms = measure(lambda task=task: book.find_offers(task), rounds)  # type: ignore[misc]
        plain_ms = None
        if len(task.resources) == 1:
            plain_ms = measure(lambda task=task: find_plainly(book, task), rounds)  # type: ignore[misc]
        show(f"find {text}", ms, count=len(book.find_offers(task)), plain_ms=plain_ms)


def bench_opening(folder: Path, rounds: int) -> None:
    program = (
        "import sys, time; from pathlib import Path; from broker.catalog.bundle import open_book; "
        "began = time.process_time(); open_book(Path(sys.argv[1])); print((time.process_time() - began) * 1000)"
    )

    def open_cold() -> float:
        done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
        return float(done.stdout)

    unpack_ms = open_cold()
    show("open in a new process, to unpack", unpack_ms)
    show("open in a new process, unpacked", min(open_cold() for _ in range(rounds)), plain_ms=unpack_ms)
    blocked = folder / "blocked"
    blocked.write_text("")
    show("open where the cache cannot be written", measure(lambda: open_book(blocked / "cache"), 2))


def bench_writing(folder: Path, book: Book) -> None:
    offers = list(book.list_offers("aws"))
    show("read every offer of aws", measure(lambda: book.list_offers("aws"), 2), count=len(offers))
    text = write_vms(offers)
    show(
        "parse them from a SkyPilot catalog",
        measure(lambda: parse_vms(text, cloud="aws", file="f"), 1),
        count=len(offers),
    )
    facts = book.get_facts("aws")
    show("exchange them in the live book", measure(lambda: replace_clouds(folder, book, [(facts, offers)]), 1))
    moved = [Offer(**{**each.__dict__, "spot_usd_hour": 1.0}) for each in offers]
    show(
        "remember that all of them moved", measure(lambda: remember_changes(folder, moved, offers, day="2026-12-01"), 1)
    )
    with closing(sqlite3.connect(folder / "price-history.db")) as database:
        (count,) = database.execute("SELECT count(*) FROM changes").fetchone()
    size = (folder / "price-history.db").stat().st_size
    print(f"history: {count:,} rows, {size / count:.0f} bytes a row; archive: {SHIPPED.stat().st_size:,} bytes")


def write_vms(offers: list[Offer]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    each: Any
    for each in offers:
        writer.writerow(
            [each.instance_type, each.accelerator, each.accelerator_count, each.vcpus, each.memory_gib,
             each.ondemand_usd_hour, each.spot_usd_hour, each.region, each.zone]
        )  # fmt: skip
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print(f"{'':<52}{'OFFERS':>9}{'':>13}{'OF PLAIN':>9}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench_opening(folder, min(rounds, 10))
        book = open_book(folder)
        bench_queries(book, rounds)
        bench_writing(folder, book)


if __name__ == "__main__":
    main()
