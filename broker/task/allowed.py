"""Rules for the values allowed in task files, flags and the Python API: one for each kind of text, with its source.

The loader, `broker schema`, the flags and `broker.plan` all read this table, so that a value that no cloud, shell or
kernel accepts is refused before any request or payment. If clouds differ, a rule accepts any value that at least one of
them accepts; `LABELS` and `BUCKETS` contain the rules of the individual clouds.

Patterns use the syntax common to Python and JSON Schema. They never match a control character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# One argument or `NAME=VALUE` of a program, including its final NUL: MAX_ARG_STRLEN of Linux, 32 pages of 4 KiB.
ARGUMENT_BYTES_MAX = 131_072
# All variables of a task. Linux allows a quarter of the stack limit, 2 MiB by default, for arguments and environment;
# this leaves room for the node's own environment and a script of `ARGUMENT_BYTES_MAX`.
ENVIRONMENT_BYTES_MAX = 1_000_000
PATH_BYTES_MAX = 4_095  # PATH_MAX of Linux, without the NUL
SKYPILOT = "skypilot:"  # prefix of SkyPilot's own machine images
_SHOWN_MAX = 60
_PLAIN = r"[^\x00-\x1f\x7f]"  # any character but the control characters
_SOLID = r"[^\s\x00-\x1f\x7f]"  # neither a control character nor a space
_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LONG_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,198}[A-Za-z0-9])?"


class Rule:
    """One kind of text.

    `expected` completes "must be ...", `source` is the origin of the rule; with `repairs`, a near miss is suggested.
    """

    def __init__(
        self,
        *,
        pattern: str,
        expected: str,
        source: str,
        bytes_max: int | None = None,
        repairs: bool = False,
        joint: str = "-",
    ) -> None:
        self.pattern = pattern
        self.expected = expected
        self.source = source
        self.bytes_max = bytes_max
        self._repairs = repairs
        self._joint = joint

    def admits(self, text: str) -> bool:
        """Return whether a text satisfies the pattern and length; text that cannot be encoded never does."""
        if not is_text(text) or (self.bytes_max is not None and len(text.encode()) > self.bytes_max):
            return False
        return re.fullmatch(self.pattern, text) is not None

    def suggest(self, text: str) -> str | None:
        """Return a hint for a refused text: its size, the error, or a near miss."""
        if not is_text(text):
            return "it contains a zero byte or half of a surrogate pair"
        if self.bytes_max is not None and (size := len(text.encode())) > self.bytes_max:
            return f"it is {size:,} bytes long"
        if self._repairs:
            near = re.sub(r"[^A-Za-z0-9]+", self._joint, text[:_SHOWN_MAX]).strip(self._joint)
            near = near if self.admits(near) else near.lower()
            return f"did you mean `{near}`?" if self.admits(near) else None
        return None


def is_text(text: str) -> bool:
    """Return whether programs, files and clouds accept the text: no NUL, and no lone surrogate."""
    return "\0" not in text and not (not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text))


def is_credential_name(name: str) -> bool:
    """Return whether a variable has the name of a credential: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY."""
    words = name.upper().split("_")
    is_key = words[-1] == "KEY" and words[-2:-1] in (["API"], ["ACCESS"], ["SECRET"], ["PRIVATE"])
    return is_key or words[-1] in ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS")


_EXECVE = "execve(2): no NUL, and one string of at most MAX_ARG_STRLEN (131,072 bytes with its NUL)"
_POSIX_PATH = "POSIX: no NUL, PATH_MAX 4,096 and NAME_MAX 255 bytes"

TASK_NAME = Rule(
    pattern=_LONG_NAME,
    expected="at most 200 letters, digits, `-`, `_` or `.`, with a letter or digit at both ends",
    source="SkyPilot's names; the length limit is broker's, because a pipeline's name becomes a folder name",
    repairs=True,
)
JOB_NAME = TASK_NAME
CLUSTER_NAME = Rule(
    pattern=r"[A-Za-z](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
    expected="at most 63 letters, digits, `-`, `_` or `.`, starting with a letter and ending with a letter or digit",
    source="SkyPilot's cluster names; the name becomes tags, folders and host names",
    repairs=True,
)
REQUEST_ID = Rule(
    pattern=rf"{_PLAIN}{{1,200}}",
    expected="1 to 200 characters without control characters",
    source="broker: it is a key in the store",
)
ENV_NAME = Rule(
    pattern="[A-Za-z_][A-Za-z0-9_]{0,254}",
    expected="an environment variable name (at most 255 letters, digits or `_`, no leading digit)",
    source="POSIX 8.1, environment variables",
    repairs=True,
    joint="_",
)
ENV_VALUE = Rule(
    pattern=r"[^\x00]*",
    expected=f"text without a zero byte, at most {ARGUMENT_BYTES_MAX - 2:,} bytes including its name",
    source=_EXECVE,
    bytes_max=ARGUMENT_BYTES_MAX - 2,
)
SCRIPT = Rule(
    pattern=r"[^\x00]*",
    expected=f"text without a zero byte, at most {ARGUMENT_BYTES_MAX - 1:,} bytes; "
    "put a longer script in a file in `workdir`",
    source=_EXECVE,
    bytes_max=ARGUMENT_BYTES_MAX - 1,
)
LABEL_KEY = Rule(
    pattern=rf"{_PLAIN}{{1,317}}",
    expected="1 to 317 characters without control characters",
    source="the longest that any cloud allows: Kubernetes, a DNS name of 253, `/` and a name of 63",
)
LABEL_VALUE = Rule(
    pattern=rf"{_PLAIN}{{0,256}}",
    expected="at most 256 characters without control characters",
    source="the longest that any cloud allows: EC2 and Azure",
)
TARGET = Rule(
    pattern=rf"(?!-)(?!/+$)(?!\.+/*$)(?!(?:[^\x00]*/)?\.\.(?:/|$))(?!(?:[^\x00]*/)?[^/\x00]{{256}}){_PLAIN}{{1,{PATH_BYTES_MAX}}}",
    expected="a path on the node, other than `/`, without `..`, control characters or a leading `-`",
    source=_POSIX_PATH,
    bytes_max=PATH_BYTES_MAX,
)
SOURCE = Rule(
    pattern=rf"{_PLAIN}{{0,{PATH_BYTES_MAX}}}",
    expected=f"a path or URL without control characters, at most {PATH_BYTES_MAX:,} bytes",
    source=_POSIX_PATH,
    bytes_max=PATH_BYTES_MAX,
)
GIT_URL = Rule(
    pattern=rf"(?:https?|ssh|git|file)://{_SOLID}{{1,2000}}|(?!-)[A-Za-z0-9._-]{{1,64}}@[A-Za-z0-9.-]{{1,253}}:{_SOLID}{{1,2000}}",
    expected="a URL such as `https://HOST/ORG/NAME` or `git@HOST:ORG/NAME.git`",
    source="git-clone(1): git URLs, without remote helpers, which run programs",
)
GIT_REF = Rule(
    pattern=r"(?![-/.])(?![^\x00]*(?:\.\.|@\{|//))[^\s\x00-\x1f\x7f~^:?*\[\\]{1,250}",
    expected="a branch, tag or commit",
    source="git-check-ref-format(1)",
)
DATA_URL = Rule(
    pattern=rf"{_PLAIN}{{1,{PATH_BYTES_MAX}}}",
    expected="a folder or bucket URL",
    source=_POSIX_PATH,
    bytes_max=PATH_BYTES_MAX,
)
PLACE = Rule(
    pattern=rf"(?!-){_SOLID}{{1,253}}",
    expected="a name without spaces or a leading `-`",
    source="Kubernetes' DNS names (253), the longest that any cloud allows",
)
INSTANCE_TYPE = Rule(
    pattern="(?!-)[!-~]{1,200}",
    expected="an instance type of the cloud, without spaces",
    source="every instance type of SkyPilot's catalogs fits",
)
IMAGE = Rule(
    pattern="(?!-)[!-~]{1,1024}",
    expected="a machine image of the cloud, or `docker:IMAGE`",
    source="Azure's gallery ids and OCI references: ASCII without spaces",
)
# Machine images of the clouds with their own adapters, which accept no other form. Other clouds have no common form.
IMAGES: Mapping[str, Rule] = {
    "aws": Rule(
        pattern=r"(?:ami-|ssm:)[!-~]{1,1024}",
        expected="an image of EC2, like `ami-...` or `ssm:/PARAMETER`",
        source="EC2: image ids; Systems Manager: parameters",
    ),
    "gcp": Rule(
        pattern=r"(?:https://[!-~]+/)?projects/[!-.0-~]+/global/images/(?:family/)?[!-.0-~]+",
        expected="an image of Compute Engine, like `projects/PROJECT/global/images/IMAGE`",
        source="Compute Engine: sourceImage",
    ),
}
# Forms of images that reveal their cloud. Azure: publisher:offer:sku:version, or the id of a gallery's image.
_IMAGE_FORMS = {
    "aws": r"(?:ami-|ssm:).*",
    "gcp": r"(?:https://.*/)?projects/.*",
    "azure": r"/(?:subscriptions|CommunityGalleries)/.*|[^:/]+(?::[^:/]+){3}",
    "oci": r"ocid1\.image\..*",
}
VOLUME_NAME = Rule(
    pattern=rf"{_NAME}|(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?)|{_PLAIN}*\${_PLAIN}*",
    expected="a volume name: letters, digits, `-`, `_` or `.`, with a letter or digit at both ends",
    source="Kubernetes: DNS subdomain names (253)",
    repairs=True,
)

# Rules of a bucket's name, by value of `store`. A name may contain variables that are filled in later.
BUCKETS: Mapping[str, Rule] = {
    "s3": Rule(
        pattern=r"(?!xn--|sthree-)(?![0-9.]+$)(?![^\x00]*\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
        expected="3 to 63 lower-case letters, digits, `-` or `.`, with a letter or digit at both ends",
        source="S3: general purpose bucket naming rules",
        repairs=True,
    ),
    "gcs": Rule(
        pattern=r"(?!goog)(?![^\x00]*\.\.)(?=[^.]{1,63}(?:\.|$))[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]",
        expected="3 to 63 lower-case letters, digits, `-`, `_` or `.`, with a letter or digit at both ends",
        source="Cloud Storage: bucket naming guidelines",
        repairs=True,
    ),
    "azure": Rule(
        pattern=r"(?![^\x00]*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]",
        expected="3 to 63 lower-case letters, digits or single `-`, with a letter or digit at both ends",
        source="Azure Storage: container names",
        repairs=True,
    ),
    "r2": Rule(
        pattern=r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]",
        expected="3 to 63 lower-case letters, digits or `-`, with a letter or digit at both ends",
        source="R2: bucket names",
        repairs=True,
    ),
}
BUCKET = Rule(  # of any store; `ORG/NAME` is Hugging Face's
    pattern=rf"|(?![^\x00]*\.\.)[A-Za-z0-9](?:[-A-Za-z0-9._/]{{0,251}}[A-Za-z0-9])?|{_PLAIN}*\${_PLAIN}*",
    expected="a bucket name: letters, digits, `-`, `_` or `.`, with a letter or digit at both ends",
    source="the most permissive of the stores; GCS allows 222",
    bytes_max=1_024,
    repairs=True,
)

_DNS = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
# Cloud -> rules of a label's key and value. For Google, any text is converted (`clouds/gcp/names.py`).
LABELS: Mapping[str, tuple[Rule, Rule]] = {
    "aws": (
        Rule(
            pattern=rf"(?![aA][wW][sS]:){_PLAIN}{{1,128}}",
            expected="1 to 128 characters that do not start with `aws:`",
            source="EC2: tag restrictions",
        ),
        LABEL_VALUE,
    ),
    "azure": (
        Rule(
            pattern=r"[^<>%&\\?/\x00-\x1f\x7f]{1,317}",
            expected="free of `<`, `>`, `%`, `&`, `\\`, `?` and `/`",
            source="Azure Resource Manager: tag names",
        ),
        LABEL_VALUE,
    ),
    "kubernetes": (
        Rule(
            pattern=rf"(?:{_DNS}/)?{_NAME}",
            expected="like `team` or `example.com/team`: at most 63 letters, digits, `-`, `_` or `.`, with a letter or "
            "digit at both ends",
            source="Kubernetes: labels, syntax and character set",
        ),
        Rule(
            pattern=rf"(?:{_NAME})?",
            expected="empty, or at most 63 letters, digits, `-`, `_` or `.`, with a letter or digit at both ends",
            source="Kubernetes: labels, syntax and character set",
        ),
    ),
}

RULES: Mapping[str, Rule] = {
    "task or job name": TASK_NAME,
    "cluster name": CLUSTER_NAME,
    "request id": REQUEST_ID,
    "name of a variable": ENV_NAME,
    "value in `envs` or `secrets`": ENV_VALUE,
    "`setup`, `run`": SCRIPT,
    "label": LABEL_KEY,
    "value of a label": LABEL_VALUE,
    **{f"label on {cloud}": key for cloud, (key, _) in LABELS.items()},
    "value of a label on kubernetes": LABELS["kubernetes"][1],
    "bucket": BUCKET,
    **{f"bucket of `store: {store}`": rule for store, rule in BUCKETS.items()},
    "volume": VOLUME_NAME,
    "target of `file_mounts` and `volumes`": TARGET,
    "`workdir`, source of `file_mounts`": SOURCE,
    "`url` of `workdir`": GIT_URL,
    "`ref` of `workdir`": GIT_REF,
    "key of `inputs` and `outputs`": DATA_URL,
    "region, zone, context": PLACE,
    "`instance_type`": INSTANCE_TYPE,
    "`image_id`": IMAGE,
}


def find_image_cloud(image: str) -> str | None:
    """Return the cloud of a machine image, judged by its form; None for other forms, and for a container."""
    forms = {} if image.startswith("docker:") else _IMAGE_FORMS
    return next((cloud for cloud, form in forms.items() if re.fullmatch(form, image)), None)


def suggest_image(image: str, cloud: str) -> str | None:
    """Return a hint for a machine image that `cloud` cannot start: it is probably a container, or another cloud's."""
    found = find_image_cloud(image)
    if found is None:
        return f"for a container, write `image_id: docker:{image[:_SHOWN_MAX]}`"
    return f"this is an image of {found}" if found != cloud else None
