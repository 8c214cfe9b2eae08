"""The choice of mutants: reproducible for a seed and a state of the sources; each file's share follows its length."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random

from tests.mutation.operators import Mutant, find_mutants, is_sound
from tests.mutation.shadow import ROOT

ROOMS = ("broker/jobs", "broker/provision", "broker/state", "broker/runtime", "broker/agent")
EQUIVALENT = Path(__file__).parent / "equivalent.toml"


def list_files(only: Sequence[str] = ROOMS) -> list[str]:
    """List files of these folders or files, by path."""
    found: set[Path] = set()
    for name in only:
        path = ROOT / name.rstrip("/")
        found.update(path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")])
    return sorted(str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py")


def draw(count: int, seed: int, files: Iterable[str]) -> list[Mutant]:
    """Draw up to `count` mutants; known equivalents are skipped.

    Each file has a share by its lines; the others make up for what a file cannot give.
    """
    sources = {file: (ROOT / file).read_text() for file in files}
    piles = {file: _pile(file, text, Random(f"{seed}/{file}")) for file, text in sources.items()}
    lines = {file: len(text.splitlines()) for file, text in sources.items()}
    found: list[Mutant] = []
    while lines and len(found) < count:
        for file, share in share_out(count - len(found), lines).items():
            taken = list(islice(piles[file], share))
            found += taken
            if len(taken) < share:
                del lines[file]
    return sorted(found, key=lambda mutant: (mutant.file, mutant.start, mutant.after))


def _pile(file: str, text: str, random: Random) -> Iterator[Mutant]:
    known = read_equivalents()
    for mutant in shuffle(find_mutants(file, text), random):
        if mutant.identity not in known and is_sound(text, mutant):
            yield mutant


def share_out(count: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Split `count` into whole numbers as near to the weights as possible (largest remainder)."""
    total = sum(weights.values())
    exact = {name: count * weight / total for name, weight in weights.items()} if total else {}
    shares = {name: int(share) for name, share in exact.items()}
    rest = sorted(exact, key=lambda name: (shares[name] - exact[name], name))
    for name in rest[: count - sum(shares.values())]:
        shares[name] += 1
    return shares


def shuffle(mutants: Sequence[Mutant], random: Random) -> Iterator[Mutant]:
    """Alternate operators, so that a frequent one does not crowd out the others."""
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_operator.setdefault(mutant.operator, []).append(mutant)
    piles = [by_operator[name] for name in sorted(by_operator)]
    for pile in piles:
        random.shuffle(pile)
    while piles:
        random.shuffle(piles)
        for pile in piles:
            yield pile.pop()
        piles = [pile for pile in piles if pile]


def read_equivalents(path: Path = EQUIVALENT) -> dict[tuple[str, str, str, str, str], str]:
    """Read the reason for each mutant that changes nothing, by `Mutant.identity`."""
    rows = tomllib.loads(path.read_text()).get("mutant", [])
    return {(row["file"], row["function"], row["operator"], row["text"], row["change"]): row["why"] for row in rows}


def find_stale(files: Iterable[str]) -> list[str]:
    """Find equivalents whose line is no longer in the sources."""
    present = {mutant.identity for file in files for mutant in find_mutants(file, (ROOT / file).read_text())}
    return [" | ".join(identity) for identity in read_equivalents() if identity not in present]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
