"""Finds the real data of the tests: in QRAG_DATA, by default in shared/data by the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def real(name: str) -> Path:
    """Returns the path of `name` among the real data, or skips the test that asks for it."""
    path = ROOT / os.environ.get("QRAG_DATA", "../shared/data") / name
    if not path.exists():
        pytest.skip(f"no real data at {path}; set QRAG_DATA")
    return path
