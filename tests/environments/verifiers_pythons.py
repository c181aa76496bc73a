"""The Pythons that have verifiers, if there are any: `make verifiers0`, `make verifiers1`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.entry_points import ROOT

PACKAGES = Path(__file__).parent / "verifiers_packages"
PYTHONS = {
    protocol: os.environ.get(
        f"QRAG_VERIFIERS{protocol[1]}_PYTHON",
        str(ROOT / f".venv-verifiers{protocol[1]}" / "bin" / "python"),
    )
    for protocol in ("v0", "v1")
}


def needs(protocol: str) -> pytest.MarkDecorator:
    python = PYTHONS[protocol]
    reason = f"no verifiers at {python}: make verifiers{protocol[1]}"
    return pytest.mark.skipif(not Path(python).exists(), reason=reason)
