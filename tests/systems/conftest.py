"""What tests of several systems share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.systems.leret_run import Trained, trained_run


@pytest.fixture(scope="session")
def leret_trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A small LeReT run; tests that change it copy it."""
    with trained_run(tmp_path_factory.mktemp("leret") / "run") as made:
        yield made
