"""What the tests of the sidecar share."""

from __future__ import annotations

from tests.llm.stand_in import model_folder, stand_in

__all__ = ["model_folder", "stand_in"]
