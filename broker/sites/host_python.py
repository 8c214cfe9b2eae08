"""Find a Python on a host that can hold a node: `python3` of RHEL 8 is Python 3.6, beside newer ones."""

from __future__ import annotations

from collections.abc import Sequence

# `python3` first: it is the one that the host's users mean.
PYTHONS = ("python3", *(f"python3.{minor}" for minor in range(14, 7, -1)))
NO_PYTHON = 79  # exit code; none of local_machine.py
# One line, as csh admits no other quoted text. The name that was found is passed on: if it is not `python3`, the node
# gets one of that name.
FIND = (
    f"for python in {' '.join(PYTHONS)}; do "
    '"$python" -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null && '
    'exec env BROKER_PYTHON="$python" "$python" -I -S "$@"; done; '
    f'echo "no Python 3.8 or newer" >&2; exit {NO_PYTHON}'
)


def make_python_argv(*arguments: str) -> Sequence[str]:
    """Return a command that runs the arguments, such as `-c PROGRAM`, with the first Python 3.8 or newer of PATH.

    Isolated and without site packages. Its exit code is NO_PYTHON if there is none.
    """
    return ["sh", "-c", FIND, "sh", *arguments]
