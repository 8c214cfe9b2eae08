"""Kubernetes fulfils the contract of all clouds: real kubectl, our own API server, real processes as pods."""

import pytest

from tests.clouds.contract import CloudContract


@pytest.mark.long
class TestKubernetes(CloudContract):
    pass
