"""Errors that end a run with one line rather than a stack trace.

TrainerError
  CheckpointError
    StaleAttemptError
"""


class TrainerError(Exception):
    """The run cannot continue as configured; the message says why."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read."""


class StaleAttemptError(CheckpointError):
    """A newer attempt of the same job has begun; this one may no longer commit."""
