"""Fixtures of the tests of the client and of the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig
from tests.llm.model_server import ModelServer
from tests.llm.stand_in import model_folder, stand_in

__all__ = ["model_folder", "stand_in"]


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@pytest.fixture
def said() -> list[str]:
    """Messages to the user from clients of `make_client`."""
    return []


@pytest.fixture
def make_client(server: ModelServer, said: list[str]) -> Iterator[Callable[..., Client]]:
    """Makes clients of `server` with short pauses and given settings; closes them at the end."""
    clients: list[Client] = []

    def make(**settings: Any) -> Client:
        fields: dict[str, Any] = {"attempt_timeout": 20.0, "deadline": 30.0, "retry_pause": 0.01}
        fields |= {"url": server.url, "model": "tiny"} | settings
        clients.append(Client(ClientConfig(**fields), said.append))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
