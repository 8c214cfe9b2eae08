"""The mistakes a run can end with that are told in one line rather than a stack trace.

TrainerError
  CheckpointError
    StaleAttemptError
"""


class TrainerError(Exception):
    """The run cannot go on as asked; the message says why."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read."""


class StaleAttemptError(CheckpointError):
    """A newer attempt of the same job has begun; this one may not commit any more."""
