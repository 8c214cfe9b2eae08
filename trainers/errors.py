"""Errors that end a run with a message instead of a stack trace.

TrainerError
  CheckpointError
    StaleAttemptError
"""


class TrainerError(Exception):
    """The run cannot continue as configured; the message says why."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read."""


class StaleAttemptError(CheckpointError):
    """A newer attempt of the job has started; this one may no longer commit checkpoints."""
