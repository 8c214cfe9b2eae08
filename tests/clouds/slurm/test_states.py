"""The tables of Slurm's states and messages cover what Slurm's own library knows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.clouds.local_machine import EXIT_CODES
from broker.clouds.slurm.states import ERRORS, EXIT_REASONS, STATES, find_error, find_state
from broker.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    QuotaError,
    TransientError,
    UnknownOutcomeError,
)
from broker.sites.host_python import NO_PYTHON
from broker.types import NodeEnd, NodeState

LIBRARIES = [*Path("/usr/lib").glob("*/slurm-wlm/libslurmfull.so"), *Path("/usr/lib").glob("*/slurm/libslurmfull.so")]
needs_library = pytest.mark.skipif(
    not LIBRARIES, reason="Slurm's library is not installed: apt-get install slurm-client"
)
SUBMISSION = (
    *range(1000, 1100),
    *range(1800, 1900),
    *range(2000, 2200),
    5000,
    5002,
    5004,
    5005,
    6000,
    6002,
    6006,
    8000,
    8001,
)
# Codes of its errors that no sbatch, squeue or scancel of ours can cause: updates of running jobs, reservations, steps,
# accounting, restarts of daemons, heterogeneous and federated jobs.
OTHERS = {
    1006, 1008, 1009, 1010, 1011, 1012, 1013, 2011, 2017, 2020, 2021, 2022, 2024, 2028, 2030, 2031, 2032, 2033, 2034,
    2040, 2042, 2043, 2046, 2047, 2049, 2055, 2056, 2058, 2061, 2062, 2063, 2064, 2065, 2067, 2071, 2073, 2075, 2076,
    2077, 2080, 2082, 2083, 2084, 2085, 2086, 2087, 2088, 2089, 2091, 2095, 2096, 2100, 2102, 2103, 2104, 2106, 2107,
    2108, 2109, 2110, 2111, 2112, 2116, 2117, 2120, 2126, 2128, 2129,
}  # fmt: skip


def list_messages() -> Iterator[tuple[int, str]]:
    library = ctypes.CDLL(str(LIBRARIES[0]))
    library.slurm_strerror.restype = ctypes.c_char_p
    for code in SUBMISSION:
        text = library.slurm_strerror(code).decode()
        if "Unknown error" not in text and "Unspecified error" not in text:
            yield code, text


@needs_library
def test_every_message_of_the_library_has_its_class() -> None:
    unknown = {
        code: text for code, text in list_messages() if code not in OTHERS and not any(key in text for key in ERRORS)
    }
    assert not unknown


@needs_library
def test_every_message_in_the_table_is_one_of_the_library() -> None:
    texts = [text for _, text in list_messages()] + ["Invalid cluster name", "Invalid cluster feature specification"]
    texts += ["User not found on host", "No eligible clusters for federated job"]
    assert not [key for key in ERRORS if not any(key in text for text in texts)]


@needs_library
def test_every_state_of_the_library_is_in_the_table() -> None:
    library = ctypes.CDLL(str(LIBRARIES[0]))
    library.job_state_string.restype = ctypes.c_char_p
    flags = [1 << shift for shift in range(8, 24)]  # slurm.h: flags above the base state, such as COMPLETING
    names = {library.job_state_string(state).decode() for state in [*range(16), *flags]} - {"?"}
    assert {"PREEMPTED", "COMPLETING", "NODE_FAIL"} <= names
    assert not names - set(STATES)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", InvalidRequestError),
        ("allocation failure: Requested node configuration is not available", CapacityError),
        (
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)",
            QuotaError,
        ),
        ("sbatch: error: Batch job submission failed: Access/permission denied", AuthError),
        ("allocation failure: User's group not permitted to use this partition", InvalidRequestError),
        ("allocation failure: Invalid account or account/partition combination specified", InvalidRequestError),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            TransientError,
        ),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", UnknownOutcomeError),
        ("sbatch: error: something that no version of today says", UnknownOutcomeError),
        ("", UnknownOutcomeError),
    ],
)
def test_each_message_of_slurm_raises_its_error(text: str, kind: type[Exception]) -> None:
    error = find_error(text)
    assert type(error) is kind
    assert "Batch job submission failed" not in error.message


def test_refusal_by_the_sites_rules_is_reported_with_its_reason() -> None:
    """A plugin for submissions (`job_submit.lua`) refuses a job before it is queued, so repeating it is in vain."""
    error = find_error(
        "sbatch: error: Please give an account: --account=PROJECT\nallocation failure: Unspecified error\n"
    )
    assert type(error) is InvalidRequestError
    assert error.message == "Slurm: Please give an account: --account=PROJECT"
    assert "`options` in `slurm.yaml`" in error.hints[0]
    assert (
        find_error("sbatch: error: Batch job submission failed: Unspecified error").message
        == "Slurm: Unspecified error"
    )


def test_partition_that_the_user_may_not_use_leaves_the_others_and_says_what_to_do() -> None:
    """An AuthError would skip all clusters, though `sinfo` lists partitions of other groups, too."""
    error = find_error("allocation failure: User's group not permitted to use this partition")
    assert not isinstance(error, AuthError) and "--account=NAME" in error.hints[0]


def test_refused_capacity_excludes_the_partition_only() -> None:
    error = find_error("allocation failure: Requested nodes are busy")
    assert isinstance(error, CapacityError) and error.scope == "zone"


def test_preemption_is_distinguished_from_a_cancellation() -> None:
    assert find_state("PREEMPTED") == (NodeState.TERMINATED, NodeEnd.PREEMPTED)
    assert find_state("CANCELLED by 1000") == (NodeState.TERMINATED, NodeEnd.TERMINATED)


def test_job_that_is_still_completing_is_not_gone() -> None:
    assert find_state("COMPLETING") == (NodeState.RUNNING, "")


def test_state_of_a_newer_slurm_is_not_taken_for_an_end() -> None:
    assert find_state("EXPEDITING") == (NodeState.RUNNING, "")


def test_exit_codes_are_those_of_the_machine_and_of_the_search_for_its_python() -> None:
    of_machine = {code: reason for code, reason in EXIT_REASONS.items() if code != NO_PYTHON}
    assert {EXIT_CODES[reason]: reason for reason in of_machine.values()} == of_machine
    assert NO_PYTHON not in EXIT_CODES.values() and "Python 3.8" in EXIT_REASONS[NO_PYTHON]
