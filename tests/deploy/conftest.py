"""A PostgreSQL for the pods."""

from tests.state.conftest import postgres

__all__ = ["postgres"]
