"""The Python that has verifiers, if there is one: `make verifiers`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.entry_points import ROOT

PACKAGES = Path(__file__).parent / "verifiers_packages"
MADE = ROOT / ".venv-verifiers" / "bin" / "python"
PYTHON = os.environ.get("QRAG_VERIFIERS_PYTHON", str(MADE))
needs_verifiers = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"no verifiers at {PYTHON}: make verifiers"
)
