"""The state folder of the command-line tests, with the proof that nothing outlives it."""

from tests.cli.conftest import shell

__all__ = ["shell"]
