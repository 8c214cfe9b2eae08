"""SSH pools fulfil the contract, with real processes on hosts without sshd."""

import pytest

from tests.clouds.contract import CloudContract


@pytest.mark.long
class TestSsh(CloudContract):
    pass
