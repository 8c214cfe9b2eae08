"""Kubernetes fulfils the contract of all clouds: real kubectl, our own API server, real processes as pods."""

from tests.clouds.contract import CloudContract


class TestKubernetes(CloudContract):
    pass
