"""Requests, and readers of their outcomes, that several tests of the client share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from qrag_jax.llm.client import Client
from qrag_jax.llm.outcomes import Answer, ChatRequest, Outcome

MakeClient = Callable[..., Client]


def chat(prompt: str, **parameters: Any) -> ChatRequest:
    """A chat whose last message is the prompt, which the server echoes."""
    return ChatRequest((("system", "Echo."), ("user", prompt)), **parameters)


def texts(outcomes: Sequence[Outcome]) -> list[str]:
    """Texts of answers and causes of failures."""
    return [outcome.text if isinstance(outcome, Answer) else outcome.cause for outcome in outcomes]


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Waits up to `seconds` for `holds()` to be true; returns whether it is."""
    ends = time.monotonic() + seconds
    while not holds() and time.monotonic() < ends:
        time.sleep(0.01)
    return holds()
