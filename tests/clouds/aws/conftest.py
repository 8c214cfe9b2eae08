from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clouds.aws.bed import AwsBed


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsBed]:
    bed = AwsBed(monkeypatch)
    yield bed
    bed.aws.close()
