"""The state folder of tests that run the product."""

from tests.cli.conftest import shell

__all__ = ["shell"]
