"""SSH pools fulfil the contract, with real processes on hosts without sshd."""

from tests.clouds.contract import CloudContract


class TestSsh(CloudContract):
    pass
