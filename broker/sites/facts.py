"""Keep the sizes of your own machines: stated in the file, or detected by `broker check`."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from broker.frozen import frozen
from broker.types import Offer

SITES = "sites"  # folder below the state folder
_BRAND = re.compile(r"^(NVIDIA|Tesla|GeForce|Quadro|\s|-)+", re.IGNORECASE)
_GEFORCE = re.compile(
    r"(?P<line>[RG]TX)?[\s-]?(?:(?P<pro>PRO)[\s-]?)?(?P<number>A?\d{4})[\s-]?(?P<ti>TI)?\b", re.IGNORECASE
)
_PART = re.compile(r"\b\d+g\.\d+gb\b", re.IGNORECASE)  # a MIG profile


@frozen
class Machine:
    """The size of one machine, or of the part of it that a job gets."""

    vcpus: float
    memory_gib: float
    accelerator: str | None = None
    accelerator_count: int = 0

    @property
    def name(self) -> str:
        """Return the instance type: `96cpu-1000gb-8xH100`."""
        cards = f"-{self.accelerator_count}x{self.accelerator}" if self.accelerator else ""
        return f"{self.vcpus:g}cpu-{self.memory_gib:g}gb{cards}"

    def make_offer(
        self,
        cloud: str,
        region: str,
        *,
        zone: str | None,
        ondemand_usd_hour: float | None,
        spot_usd_hour: float | None = None,
    ) -> Offer:
        """Return one machine as an offer. Prices are in USD per hour; None means not offered with that pricing."""
        return Offer(
            cloud=cloud,
            region=region,
            zone=zone,
            instance_type=self.name,
            vcpus=self.vcpus,
            memory_gib=self.memory_gib,
            accelerator=self.accelerator,
            accelerator_count=self.accelerator_count,
            ondemand_usd_hour=ondemand_usd_hour,
            spot_usd_hour=spot_usd_hour,
        )


def find_facts(cloud: str, home: Path) -> Path:
    """Return the path of the sizes that `broker check` detected."""
    return home / SITES / f"{cloud}.json"


def read_facts(path: Path) -> Mapping[str, Machine]:
    """Return the detected sizes; empty if the file is not readable, because `broker check` writes it again."""
    try:
        return {key: Machine(**value) for key, value in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_facts(path: Path, facts: Mapping[str, Machine]) -> None:
    """Replace the detected sizes."""
    write_json(path, {key: asdict(machine) for key, machine in sorted(facts.items())})


def write_json(path: Path, value: object) -> None:
    """Replace a file of the state folder atomically. A server writes it in several threads."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    aside.write_text(json.dumps(value, indent=1))
    aside.replace(path)


def is_part(text: str) -> bool:
    """Return whether a name is that of a part of a card, such as `a100_1g.5gb`."""
    return _PART.search(text.replace("_", " ")) is not None


def name_accelerator(text: str) -> str:
    """Return the price book's name for a card, from the name that a driver or a site uses.

    `NVIDIA H100 80GB HBM3` -> H100, `nvidia_a100-sxm4-80gb` -> A100-80GB, `Tesla V100-SXM2-16GB` -> V100, `a100` ->
    A100, `NVIDIA GeForce RTX 4090` -> RTX4090, `2080ti` -> RTX2080TI, `NVIDIA RTX A6000` -> RTXA6000,
    `NVIDIA RTX 6000 Ada Generation` -> RTX6000-Ada, `a100_1g.5gb` -> A100-1G.5GB: a part of a card is not that card.
    """
    bare = _BRAND.sub("", text.strip().replace("_", " "))
    if (found := _GEFORCE.match(bare)) and (found["line"] or found["number"].isdigit()):
        line = (found["line"] or ("GTX" if found["number"] < "2000" else "RTX")).upper()
        suffix = "-Ada" if re.search(r"\bada\b", bare, re.IGNORECASE) else ""
        return f"{line}{(found['pro'] or '').upper()}{found['number'].upper()}{(found['ti'] or '').upper()}{suffix}"
    name = re.split(r"[\s-]", bare, maxsplit=1)[0].upper()
    if (part := _PART.search(bare)) and part[0].upper() != name:
        return f"{name}-{part[0].upper()}"
    return f"{name}-80GB" if name == "A100" and re.search(r"80\s*GB", bare, re.IGNORECASE) else name
