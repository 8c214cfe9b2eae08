"""The places of `resources`: cloud, region and zone, alone or together as `infra`."""

from __future__ import annotations

from dataclasses import replace

from broker.task import allowed
from broker.task.reading import suggest
from broker.task.shapes import Choice, Scalar, Schema, Text, any_case
from broker.task.yaml_reader import Marked

# SkyPilot 0.14.1 `sky/skylet/constants.py` ALL_CLOUDS, its short names, and additional clouds of broker's price book.
CLOUDS = (
    "aws", "azure", "gcp", "lambda", "runpod", "nebius", "oci", "hyperbolic", "seeweb", "verda", "jarvislabs",
    "cudo", "do", "fluidstack", "ibm", "mithril", "paperspace", "primeintellect", "scp", "shadeform", "vast",
    "vsphere", "yotta", "kubernetes", "k8s", "ssh", "slurm", "local",
)  # fmt: skip
# Other common names of clouds, and services that run on them.
_OTHER_NAMES = {
    "amazon": "aws", "coreweave": "kubernetes", "digitalocean": "do", "ec2": "aws", "gce": "gcp", "gke": "kubernetes",
    "eks": "kubernetes", "google": "gcp", "microsoft": "azure", "oracle": "oci",
}  # fmt: skip
_EVERYWHERE = "remove it: without `cloud` and `infra`, every cloud is considered"
WITH_CONTEXTS = ("kubernetes", "k8s", "ssh")  # the text after the `/` is a single name


class Infra(Scalar):
    """Parse `aws`, `aws/us-east-1`, `*/*/us-east-1a`, `k8s/any/context` into parts; `*` and empty parts become None."""

    expected = "like `aws`, `aws/us-east-1` or `aws/us-east-1/us-east-1a`"

    def parse(self, marked: Marked) -> tuple[str | None, ...] | None:
        text = marked.value.strip() if isinstance(marked.value, str) else ""
        cloud, *rest = text.removesuffix("/").split("/")
        is_known = cloud == "*" or cloud.lower() in CLOUDS
        if not is_known or not all(rest):
            return None
        if cloud.lower() in WITH_CONTEXTS:  # a context's name may contain slashes
            rest = ["/".join(rest)] if rest else []
        if not all(allowed.PLACE.admits(each) for each in rest):
            return None
        if len(rest) > 2:
            return None
        parts = [None if each == "*" else each for each in (cloud.lower(), *rest)]
        return (*parts, None, None)[:3]

    def hint(self, marked: Marked) -> str | None:
        text = str(marked.value)
        if text.count("/") <= 2 and " " in text.strip() and self.parse(replace(marked, value=text.replace(" ", ""))):
            return f"remove the spaces: `{text.replace(' ', '')}`"
        if ":" in text and "/" not in text and self.parse(replace(marked, value=text.replace(":", "/"))):
            return f"write `{text.replace(':', '/')}`"
        cloud = text.split("/")[0].strip()
        if cloud.lower() in (*CLOUDS, "*"):
            return None
        return _suggest_cloud(cloud) or suggest(cloud, CLOUDS) or f"known clouds: {', '.join(CLOUDS)}"

    def describe(self) -> Schema:
        others = any_case([cloud for cloud in CLOUDS if cloud not in WITH_CONTEXTS])
        part = r"/(?!-)[^/\s\x00-\x1f\x7f]{1,253}"
        context = r"/(?!-)(?=[^\s]{1,253}/?\s*$)[^/\s\x00-\x1f\x7f]+(?:/[^/\s\x00-\x1f\x7f]+)*"
        pattern = rf"(?:{others}|\*)(?:{part}){{0,2}}/?|(?:{any_case(WITH_CONTEXTS)})(?:{context})?/?"
        return {"anyOf": [{"enum": [*CLOUDS, "*"]}, {"type": "string", "pattern": rf"^\s*(?:{pattern})\s*$"}]}


def _suggest_cloud(name: str) -> str | None:
    """Return a hint for another name of a cloud, or for a word that means any."""
    if name.lower() in ("*", "any", "all", "auto"):
        return _EVERYWHERE
    return f"write `{found}`" if (found := _OTHER_NAMES.get(name.lower())) else None


class CloudName(Choice):
    """`aws`."""

    def hint(self, marked: Marked) -> str | None:
        is_place = isinstance(marked.value, str) and "/" in marked.value and Infra().parse(marked) is not None
        if is_place:
            return f"write `infra: {marked.value}` instead"
        return _suggest_cloud(str(marked.value)) or super().hint(marked)


class PlaceName(Text):
    """`us-east-1`: one name, not a pattern or several, which no cloud's places match."""

    def __init__(self) -> None:
        super().__init__(rule=allowed.PLACE)
        self.pattern = rf"(?!.*[*,]){allowed.PLACE.pattern}"
        self.expected = "a single name without spaces, `*`, `,` or a leading `-`"

    def parse(self, marked: Marked) -> str | None:
        text = super().parse(marked)
        return None if text is None or "*" in text or "," in text else text

    def hint(self, marked: Marked) -> str | None:
        if marked.value == "*":
            return "remove it: any place fits without it"
        if isinstance(marked.value, list) or "*" in str(marked.value) or "," in str(marked.value):
            return "write each one as an alternative: `any_of: [{infra: aws/us-east-1}, {infra: aws/us-west-2}]`"
        return super().hint(marked)
