"""Fetch uv, which installs torch without root, pip or venv, and a newer Python if the node's is too old.

The wheel comes from the package index that the user's settings for uv or pip name, and is verified by its checksum.
Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import html
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Iterator, Mapping
from urllib.error import URLError
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import Request, url2pathname, urlopen

from trainers.node_gpus import SetupError, read_version

UV = "0.13.9"
WHEELS = {  # SHA-256 as listed by PyPI
    ("x86_64", "glibc"): (
        f"uv-{UV}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",
    ),
    ("x86_64", "musl"): (
        f"uv-{UV}-py3-none-musllinux_1_1_x86_64.whl",
        "2c45530751517d6c3bbc69a19473f6effe47cce047bede01ffd8af7ea7b36b25",
    ),
    ("aarch64", "glibc"): (
        f"uv-{UV}-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64.whl",
        "5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe",
    ),
}
WHEELS["aarch64", "musl"] = WHEELS["aarch64", "glibc"]
PYPI = "https://pypi.org/simple"
PIP_FILES = ("/etc/xdg/pip/pip.conf", "/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
# uv's names for pip's settings. uv takes a package from the first index that has it, pip the best version of all;
# settings written for pip rely on the latter.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
}
SOURCES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_NO_INDEX")
INDEX_HINT = "name an index that the node reaches (`UV_DEFAULT_INDEX` in the task's `envs:`), or an image with torch"
TRIES, RETRY_S, ANSWER_S = 3, 5.0, 60.0


def read_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with pip's settings (variables and files) translated to uv's; uv's own take precedence."""
    pip = read_pip_files(variables)
    for name in UV_NAMES:
        if value := variables.get(f"PIP_{name.upper().replace('-', '_')}"):
            pip[name] = value
    settings = {UV_NAMES[name]: " ".join(value.split()) for name, value in pip.items() if name in UV_NAMES}
    if "UV_FIND_LINKS" in settings:
        settings["UV_FIND_LINKS"] = settings["UV_FIND_LINKS"].replace(" ", ",")
    if settings.get("UV_NO_INDEX", "").lower() in ("0", "no", "false", "off"):
        del settings["UV_NO_INDEX"]
    if "UV_INDEX" in settings:
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {**settings, **variables}


def names_index(settings: Mapping[str, str]) -> bool:
    """Return whether the user configured a package index: then torch comes from there as well."""
    return any(settings.get(name) for name in SOURCES)


def read_pip_files(variables: Mapping[str, str]) -> dict[str, str]:
    """Return pip's settings from its configuration files; later files win."""
    parser = configparser.RawConfigParser(strict=False)
    files = [*PIP_FILES, str(Path(sys.prefix) / "pip.conf"), variables.get("PIP_CONFIG_FILE", "")]
    try:
        parser.read([Path(path).expanduser() for path in files if path])
    except configparser.Error as error:
        print(f"warning: pip's settings cannot be read: {error}", flush=True)
    options: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            options.update(parser.items(section))
    return options


def find_uv(folder: Path, settings: Mapping[str, str]) -> str:
    """Return the path of uv.

    It is the one on PATH if that is at least as new as ours, otherwise the one in `folder`, fetched if missing.
    """
    uv = shutil.which("uv", path=settings.get("PATH", os.defpath))
    if uv:
        words = subprocess.run([uv, "--version"], capture_output=True, text=True, check=False).stdout.split()
        if len(words) > 1 and read_version(words[1]) >= read_version(UV):
            return uv
    program = folder / f"uv-{UV}"
    if not program.exists():
        libc = "glibc" if platform.libc_ver()[0] == "glibc" else "musl"
        wheel = WHEELS.get((platform.machine(), libc))
        if sys.platform != "linux" or wheel is None:
            raise SetupError(
                f"no Python here has torch, and none can be installed on {sys.platform} {platform.machine()}",
                "install torch on the node, or choose an image that has it",
            )
        aside = program.with_name(f".{program.name}.{os.getpid()}")
        aside.write_bytes(extract(fetch(*wheel, settings=settings)))
        aside.chmod(0o755)
        aside.replace(program)
    return str(program)


def extract(wheel: bytes) -> bytes:
    """Return the `uv` binary in a wheel."""
    return zipfile.ZipFile(io.BytesIO(wheel)).read(f"uv-{UV}.data/scripts/uv")


def fetch(name: str, digest: str, *, settings: Mapping[str, str]) -> bytes:
    """Return the wheel's bytes. Raises SetupError if no index has it, with the answer of each."""
    reasons: list[str] = []
    for attempt in range(TRIES):
        if attempt:
            time.sleep(RETRY_S * attempt)
        reasons = []
        for page in list_pages(settings):
            try:
                for link in list_links(page):
                    if unquote(urlsplit(link).path).rpartition("/")[2] == name:
                        content = read(link)
                        if hashlib.sha256(content).hexdigest() == digest:
                            return content
                        reasons.append(f"{hide_login(page)}: {name} has another checksum")
            except (OSError, URLError, ValueError) as error:
                reasons.append(f"{hide_login(page)}: {getattr(error, 'reason', error)}")
    raise SetupError(
        f"uv {UV} cannot be fetched: {'; '.join(reasons) or 'no index lists it'}",
        INDEX_HINT,
    )


def list_pages(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield the addresses of pages that may link to uv: folders of wheels, further indexes, the index."""
    yield from (as_url(link) for link in settings.get("UV_FIND_LINKS", "").split(",") if link)
    if settings.get("UV_NO_INDEX"):
        return
    default = settings.get("UV_DEFAULT_INDEX") or settings.get("UV_INDEX_URL") or PYPI
    further = " ".join(settings.get(name, "") for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL")).split()
    for index in [*further, default]:
        yield as_url(re.sub(r"^[\w.-]+=", "", index)).rstrip("/") + "/uv/"  # an index may be `name=url`


def as_url(place: str) -> str:
    """Return a URL, or the `file:` URL of a local path."""
    return place if re.match(r"[a-z][a-z+.-]+://", place) else Path(place).expanduser().resolve().as_uri()


def list_links(page: str) -> list[str]:
    """Return the links of a page of the simple index (PEP 503), or the files of a folder."""
    folder = Path(url2pathname(urlsplit(page).path)) if page.startswith("file:") else None
    if folder and folder.is_dir() and not (folder / "index.html").exists():
        return [path.as_uri() for path in sorted(folder.iterdir())]
    text = read(f"{page.rstrip('/')}/index.html" if folder and folder.is_dir() else page).decode("utf-8", "replace")
    return [urljoin(page, html.unescape(link)) for link in re.findall(r"""<a\s[^>]*?href=["']([^"']+)""", text)]


def read(url: str) -> bytes:
    """Return the content at a URL; a login in it is sent as HTTP basic authentication."""
    parts = urlsplit(url)
    headers = {"Accept": "application/vnd.pypi.simple.v1+html, text/html;q=0.9, */*;q=0.1"}
    if parts.username:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    with urlopen(Request(hide_login(url), headers=headers), timeout=ANSWER_S) as answer:
        content: bytes = answer.read()
    return content


def hide_login(url: str) -> str:
    """Return the URL without user name and password, for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))
