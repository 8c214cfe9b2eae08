"""A git repository as `workdir`: cloned on this machine at one commit, which every node and every attempt receives.

The branch or tag is resolved once, at the launch. Credentials come from this machine's git; as in SkyPilot,
GIT_TOKEN and GIT_SSH_KEY_PATH add a token for https and a key for ssh. They stay on this machine: nodes receive only
files.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from broker.environment import make_git_environment
from broker.errors import InvalidRequestError, UsageError
from broker.runtime.skyignore import CLONE_MARK
from broker.types import Repository, Task

CLONES = "repositories"  # in the state folder
GIT_S = 600.0
_COMMIT = "[0-9a-f]{7,64}"
_USER = r"(?<=//)[^/@]*@"  # a user or a token in a URL
_LOG_IN = "set GIT_TOKEN to a token that may read it, or use an ssh URL"
# Git reports the cause of a failure only as text, which is in English here: words in it -> the reason, and the remedy.
_CAUSES = (
    ("terminal prompts disabled", "it requires a login, and git has none for it", _LOG_IN),
    ("Authentication failed", "it refused the login", _LOG_IN),
    ("returned error: 403", "the login may not read it", _LOG_IN),
    (
        "Host key verification failed",
        "ssh does not know its host key, or the key has changed",
        "connect once by hand, and compare the key with the one that the host publishes: `ssh -T git@{host}`",
    ),
    (
        "Permission denied (",
        "it accepts none of this machine's ssh keys",
        "add a key there, or set GIT_SSH_KEY_PATH to the file of one; see which are tried: `ssh -vT git@{host}`",
    ),
    (
        "ssh: not found",
        "git requires `ssh` for it, which is not installed on this machine",
        "install OpenSSH's client (`apt-get install openssh-client`), or use an https URL",
    ),
)


def fetch_repositories(tasks: Sequence[Task], home: Path, *, note: Callable[[str], None]) -> tuple[Task, ...]:
    """Return the tasks with each repository replaced by the folder of its clone.

    A commit is cloned once. Raises UsageError if git is not installed, and InvalidRequestError for a repository or ref
    that git cannot read.
    """
    return tuple(each if each.repository is None else _fetch(each, each.repository, home, note) for each in tasks)


def _fetch(task: Task, repository: Repository, home: Path, note: Callable[[str], None]) -> Task:
    git = _Git(repository, home / CLONES)
    kind, commit = git.find_commit()
    folder, commit = git.clone(commit)
    at = f" {kind} `{repository.ref}`" if repository.ref else ""
    note(f"`workdir`: {git.url}{at} is commit {commit[:12]}; all nodes and attempts get it")
    envs = {"GIT_URL": git.url, "GIT_COMMIT_HASH": commit}
    if kind in ("branch", "tag") and repository.ref:
        envs[f"GIT_{kind.upper()}"] = repository.ref
    return replace(task, repository=None, workdir=str(folder), envs={**task.envs, **envs})


def strip_credentials(url: str) -> str:
    """Return the URL without a user or a token: `https://TOKEN@host/x` -> `https://host/x`; ssh keeps its user."""
    return re.sub(_USER, "", url) if url.startswith(("https://", "http://")) else url


def _is_clone(folder: Path) -> bool:
    return (folder / ".git" / CLONE_MARK).is_file()


class _Git:
    """The git commands for one repository. Messages never contain its credentials."""

    def __init__(self, repository: Repository, clones: Path) -> None:
        self._clones = clones
        self._remote = repository.url
        self._ref = repository.ref
        self.url = strip_credentials(repository.url)
        program = shutil.which("git")
        if program is None:
            message = "`workdir` is a git repository, but `git` is not installed on this machine"
            raise UsageError(message, hints=["install git, or clone the repository and pass `--workdir FOLDER`"])
        self._program = program
        self._environment = _make_environment(repository.url)

    def find_commit(self) -> tuple[str, str]:
        """Return the kind of the ref (branch, tag, commit) and its commit, without cloning."""
        lines = (line.partition("\t") for line in self._run("ls-remote", self._remote).splitlines())
        refs = {name: commit for commit, _, name in lines}
        if self._ref is None:
            if "HEAD" not in refs:
                raise self._refuse("it is empty")
            return "branch", refs["HEAD"]
        for kind, names in (
            ("branch", [f"refs/heads/{self._ref}"]),
            (
                "tag",
                [f"refs/tags/{self._ref}^{{}}", f"refs/tags/{self._ref}"],
            ),  # the first is an annotated tag's commit
        ):
            for name in names:
                if name in refs:
                    return kind, refs[name]
        if re.fullmatch(_COMMIT, self._ref):
            return "commit", self._ref
        raise self._refuse(f"it has no branch, tag or commit `{self._ref}`", _suggest_ref(self._ref, refs))

    def clone(self, commit: str) -> tuple[Path, str]:
        """Return the folder of the commit and its full hash; clone it unless a clone exists."""
        if _is_clone(folder := self._find_folder(commit)):
            return folder, commit
        self._clones.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._clones, prefix=".clone-") as aside:
            clone = Path(aside) / "clone"
            self._run("init", "--quiet", str(clone))
            self._run("-C", str(clone), "remote", "add", "origin", self.url)
            try:
                self._run("-C", str(clone), "fetch", "--quiet", "--depth", "1", self._remote, commit)
            except InvalidRequestError:  # an abbreviated commit, or a server that only serves refs
                names = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
                self._run("-C", str(clone), "fetch", "--quiet", self._remote, *names)
            self._run("-C", str(clone), "checkout", "--quiet", "--detach", commit)
            found = self._run("-C", str(clone), "rev-parse", "HEAD").strip()
            (clone / ".git" / CLONE_MARK).write_text(f"{self.url} {found}\n")
            if not _is_clone(folder := self._find_folder(found)):
                clone.rename(folder)
        return folder, found

    def _find_folder(self, commit: str) -> Path:
        return self._clones / f"{hashlib.sha256(self.url.encode()).hexdigest()[:16]}-{commit}"

    def _run(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [self._program, *arguments], env=self._environment, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=GIT_S, check=False,
                start_new_session=True,  # without a terminal on which git's ssh could prompt for a password
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise self._refuse(f"git did not finish in {GIT_S / 60:g} minutes") from None
        if done.returncode:
            raise self._refuse(*self._explain(done.stderr, done.returncode))
        return done.stdout

    def _explain(self, stderr: str, code: int) -> tuple[str, str | None]:
        """Return the reason for git's failure, and a hint for common causes."""
        for words, reason, hint in _CAUSES:
            if words in stderr:
                return reason, hint.format(host=_find_host(self._remote))
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        # Git reports the failure of ssh after ssh's own output.
        ends = [number for number, line in enumerate(lines) if line.startswith(("fatal:", "error:"))]
        if ends and ends[0] and "Could not read from remote" in lines[ends[0]]:
            ends = [ends[0] - 1]
        cause = lines[ends[0]] if ends else lines[-1] if lines else f"git ended with {code}"
        return cause.replace(self._remote, self.url)[:200], None

    def _refuse(self, reason: str, hint: str | None = None) -> InvalidRequestError:
        try_it = f"try `git ls-remote {self.url}`; for a private repository set GIT_TOKEN or use an ssh URL"
        return InvalidRequestError(f"`workdir`: cannot read {self.url}: {reason}", hints=[hint or try_it])


def _suggest_ref(ref: str, refs: Mapping[str, str]) -> str | None:
    from broker.task.reading import suggest

    names = [name.removeprefix("refs/heads/").removeprefix("refs/tags/") for name in refs if name != "HEAD"]
    branches = [name.removeprefix("refs/heads/") for name in refs if name.startswith("refs/heads/")]
    return suggest(ref, names) or f"its branches: {', '.join(branches[:6])}"


def _find_host(url: str) -> str:
    """Return the host of a URL, or of the form `user@host:path`."""
    return urlsplit(url).hostname or url.rpartition("@")[2].partition(":")[0]


def _make_environment(url: str) -> dict[str, str]:
    """Return the environment of git: without prompts, and with SkyPilot's variables for private repositories."""
    environment = make_git_environment()
    key = environment.get("GIT_SSH_KEY_PATH")
    ssh = f"ssh -i {shlex.quote(str(Path(key).expanduser()))} -o IdentitiesOnly=yes" if key else "ssh"
    environment.setdefault("GIT_SSH_COMMAND", f"{ssh} -o BatchMode=yes")
    token, parts = environment.get("GIT_TOKEN"), urlsplit(url)
    if token and parts.scheme == "https" and parts.username is None:
        basic = base64.b64encode(f"x-access-token:{token}".encode()).decode()
        # In the environment, because program arguments are visible to all users of a machine.
        environment |= {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"http.https://{parts.hostname}/.extraHeader",
            "GIT_CONFIG_VALUE_0": f"Authorization: Basic {basic}",
        }
    return environment
