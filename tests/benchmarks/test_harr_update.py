"""HARR's update beside PyTorch with PEFT: a tiny encoder, the same numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("peft", reason="peft, the adapters of the peer, is missing")

from benchmarks import harr_update


def test_the_peer_computes_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harr_update, "_speed", lambda *_: iter(()))
    loss, gradients = harr_update.cases(quick=True)
    assert loss.holds
    assert gradients.holds
    assert abs(loss.value or 0.0) > 1e-4  # else it would agree with a loss of zero
    assert loss.details["clipped share of the ratios"] > 0
    assert gradients.details["largest gradient"] > 0.01
