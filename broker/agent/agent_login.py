"""Find a node's logins for buckets: variables, the files of AWS's and Google's tools, the machine's identity.

Standard library only. Google's service account keys sign with RSA, which the standard library lacks: PKCS #1 v1.5 with
SHA-256 is a padding and one modular power (RFC 8017, section 8.2.1).
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import json
import shlex
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

METADATA = "http://169.254.169.254"
METADATA_S = 2.0
ANSWER_S = 10.0
PROCESS_S = 30.0
TOKEN_URL = "https://oauth2.googleapis.com/token"
TOKEN_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
TOKEN_S = 3600  # the longest that Google allows (OAuth 2.0 for service accounts)
SHA256_PREFIX = bytes.fromhex("3031300d060960864801650304020105000420")  # RFC 8017, section 9.2, note 1
INTEGER, SEQUENCE, OCTETS = 0x02, 0x30, 0x04  # tags of ASN.1


class Refused(Exception):
    """A missing login or refused request, reported as one line in the runner's log."""


class RefusesRedirects(urllib.request.HTTPRedirectHandler):
    """Raise a redirect as an HTTPError: urllib would send the login along, to whatever server it names."""

    def redirect_request(self, *arguments: Any) -> None:
        """Return None: do not follow."""
        return None


def find_s3_login(variables: Mapping[str, str]) -> dict[str, str]:
    """Return keys from the environment, else from AWS's files, else from the machine's role (IMDSv2)."""
    if variables.get("AWS_ACCESS_KEY_ID") and variables.get("AWS_SECRET_ACCESS_KEY"):
        names = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
        return {short: variables.get(name, "") for short, name in names.items()}
    if login := read_profile(variables):
        return login
    base = f"{METADATA}/latest/meta-data/iam/security-credentials/"
    try:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token = fetch_metadata(urllib.request.Request(f"{METADATA}/latest/api/token", method="PUT", headers=ttl))
        headers = {"X-aws-ec2-metadata-token": token}
        role = fetch_metadata(urllib.request.Request(base, headers=headers)).split()[0]
        keys = json.loads(fetch_metadata(urllib.request.Request(base + role, headers=headers)))
        return {"key": keys["AccessKeyId"], "secret": keys["SecretAccessKey"], "token": keys["Token"]}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise Refused("no login for S3: no AWS_ACCESS_KEY_ID, no profile, and the machine has no role") from error


def read_profile(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a profile in `~/.aws` or the files in the variables, or from its `credential_process`."""
    home = Path(variables.get("HOME") or Path.home())
    name = variables.get("AWS_PROFILE") or "default"
    places = (
        (variables.get("AWS_SHARED_CREDENTIALS_FILE") or str(home / ".aws" / "credentials"), name),
        (variables.get("AWS_CONFIG_FILE") or str(home / ".aws" / "config"), f"profile {name}"),
        (variables.get("AWS_CONFIG_FILE") or str(home / ".aws" / "config"), name),
    )
    for path, section in places:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        profile = dict(parser.items(section)) if parser.has_section(section) else {}
        if profile.get("aws_access_key_id") and profile.get("aws_secret_access_key"):
            token = profile.get("aws_session_token", "")
            return {"key": profile["aws_access_key_id"], "secret": profile["aws_secret_access_key"], "token": token}
        if profile.get("credential_process"):
            return run_process(profile["credential_process"])
    return {}


def run_process(command: str) -> dict[str, str]:
    """Run the process without a shell, as AWS's libraries do (AWS SDKs and Tools, "Process credential provider")."""
    try:
        process = subprocess.run(
            shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=PROCESS_S, check=True
        )
        keys = json.loads(process.stdout.decode("utf-8"))
        return {"key": keys["AccessKeyId"], "secret": keys["SecretAccessKey"], "token": keys.get("SessionToken", "")}
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"no login for S3: `credential_process` failed ({type(error).__name__})") from error


def find_google_token(variables: Mapping[str, str]) -> str:
    """Return a token by GOOGLE_APPLICATION_CREDENTIALS, else gcloud's file, else the machine's service account."""
    home = Path(variables.get("HOME") or Path.home())
    folder = variables.get("CLOUDSDK_CONFIG") or str(home / ".config" / "gcloud")
    named = variables.get("GOOGLE_APPLICATION_CREDENTIALS")
    path = Path(named or Path(folder) / "application_default_credentials.json")
    try:
        key: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if named:
            raise Refused(f"no login for gs://: `{named}` does not exist") from error
        return fetch_machine_token()
    except (OSError, ValueError) as error:
        raise Refused(f"no login for gs://: `{path}` cannot be read") from error
    try:
        if key.get("type") == "service_account":
            grant = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": make_assertion(key)}
        elif key.get("type") == "authorized_user":
            names = ("client_id", "client_secret", "refresh_token")
            grant = {"grant_type": "refresh_token", **{name: str(key[name]) for name in names}}
        else:
            raise Refused(f"no login for gs://: `{path}` has the unknown type `{key.get('type')}`")
        url = str(key.get("token_uri") or TOKEN_URL)
        request = urllib.request.Request(url, data=urllib.parse.urlencode(grant).encode(), method="POST")
        with urllib.request.build_opener(RefusesRedirects).open(request, timeout=ANSWER_S) as answer:
            return str(json.loads(answer.read().decode("utf-8"))["access_token"])
    except urllib.error.HTTPError as error:
        raise Refused(f"no login for gs://: Google refused `{path}`: HTTP {error.code}") from error
    except OSError as error:
        raise Refused(f"no login for gs://: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise Refused(f"no login for gs://: `{path}` is damaged ({type(error).__name__})") from error


def fetch_machine_token() -> str:
    """Return an access token from the metadata server of a Google machine."""
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    try:
        answer = fetch_metadata(urllib.request.Request(METADATA + path, headers={"Metadata-Flavor": "Google"}))
        return str(json.loads(answer)["access_token"])
    except (OSError, ValueError, KeyError) as error:
        raise Refused("no login for gs://: no credentials file, and the machine has no service account") from error


def make_assertion(key: Mapping[str, Any]) -> str:
    """Return a signed JWT that Google exchanges for a token ("Using OAuth 2.0 for Server to Server Applications")."""
    now_s = int(time.time())
    head = {"alg": "RS256", "typ": "JWT", "kid": key.get("private_key_id", "")}
    claims = {
        "iss": key["client_email"],
        "scope": TOKEN_SCOPE,
        "aud": str(key.get("token_uri") or TOKEN_URL),
        "iat": now_s,
        "exp": now_s + TOKEN_S,
    }
    text = b".".join(encode(json.dumps(part).encode()) for part in (head, claims))
    return (text + b"." + encode(sign(text, str(key["private_key"])))).decode("ascii")


def encode(content: bytes) -> bytes:
    """Encode as unpadded URL-safe Base64, as JWT requires (RFC 7515)."""
    return base64.urlsafe_b64encode(content).rstrip(b"=")


def sign(text: bytes, pem: str) -> bytes:
    """Sign by RS256 with an RSA key in Google's format: PKCS #8 in PEM."""
    modulus, exponent = read_rsa_key(pem)
    size = (modulus.bit_length() + 7) // 8
    digest = SHA256_PREFIX + hashlib.sha256(text).digest()
    padded = b"\x00\x01" + b"\xff" * (size - len(digest) - 3) + b"\x00" + digest
    return pow(int.from_bytes(padded, "big"), exponent, modulus).to_bytes(size, "big")


def read_rsa_key(pem: str) -> tuple[int, int]:
    """Return modulus and private exponent (RFC 5958: version, algorithm, octets; RFC 8017: version, n, e, d).

    Raises ValueError, IndexError for another format.
    """
    body = "".join(line.strip() for line in pem.splitlines() if line and not line.startswith("-----"))
    outer = read_items(read_items(base64.b64decode(body, validate=True))[0][1])
    inner = read_items(read_items([content for tag, content in outer if tag == OCTETS][0])[0][1])  # noqa: RUF015
    numbers = [int.from_bytes(content, "big") for tag, content in inner if tag == INTEGER]
    return numbers[1], numbers[3]


def read_items(data: bytes) -> list[tuple[int, bytes]]:
    """Return consecutive DER items as pairs of tag and content."""
    items, place = [], 0
    while place < len(data):
        tag, length, place = data[place], data[place + 1], place + 2
        if length & 0x80:
            count = length & 0x7F
            length, place = int.from_bytes(data[place : place + count], "big"), place + count
        if place + length > len(data):
            raise ValueError("truncated DER item")
        items.append((tag, data[place : place + length]))
        place += length
    return items


def fetch_metadata(request: urllib.request.Request) -> str:
    """Return the metadata server's answer, bypassing any proxy of the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), RefusesRedirects)
    with opener.open(request, timeout=METADATA_S) as answer:
        text: str = answer.read().decode("utf-8")
        return text
