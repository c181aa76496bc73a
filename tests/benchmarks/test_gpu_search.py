"""The search as a row of the suite gpu: what is found in its text, and what is asked of it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu_faults import search_faults
from benchmarks.gpu_rows import Row
from benchmarks.gpu_search import (
    SEARCH,
    TINY_CORPUS,
    WIKIPEDIA,
    largest_scores,
    least_seconds,
    search_cases,
)
from benchmarks.lowered import lowered


def test_the_peaks_of_a_search() -> None:
    """Of many queries products take longest, of one the reading of the vectors."""
    h100 = "NVIDIA H100 80GB HBM3"
    products = 2 * 21_015_324 * 1024 * 1024 / 989e12
    assert least_seconds(WIKIPEDIA, 1, h100) == pytest.approx(products)
    assert least_seconds(WIKIPEDIA, 8, h100) == pytest.approx(products / 8)
    reading = 2 * 21_015_324 * 1024 / 3.35e12
    assert least_seconds(WIKIPEDIA._replace(queries=1), 1, h100) == pytest.approx(reading)
    assert least_seconds(WIKIPEDIA, 1, "a device of another maker") is None


def test_scores_are_found_in_a_text() -> None:
    block = "bf16[21015328,1024] f32[1024,65536] f32[1024,4096,16] s32[1024,9999999]"
    share = largest_scores(block, WIKIPEDIA)
    assert share == pytest.approx(65536 / 21_015_324)
    whole = largest_scores(f"{block} f32[1024,21015328]", WIKIPEDIA)
    assert whole == pytest.approx(1)
    found = {"many_scores": True, "largest_scores": share}
    assert search_faults(found) == []
    assert search_faults(found | {"largest_scores": whole}) == [
        "holds 100% of a batch's scores at once"
    ]
    assert search_faults(found | {"largest_scores": whole, "many_scores": False}) == []


@pytest.mark.parametrize(("seconds", "holds"), [(0.08, True), (0.1, False)])
def test_the_share_of_the_roofline(seconds: float, holds: bool) -> None:
    row: dict[str, Any] = {
        "least_seconds": 0.0446,
        "estimate": {"seconds": seconds},
        "many_scores": True,
        "largest_scores": 0.01,
    }
    (case,) = search_cases("row", row)
    assert case.value == pytest.approx(0.0446 / seconds)
    assert case.holds == holds
    assert search_cases("row", row | {"least_seconds": None}) == []
    assert search_cases("row", {}) == []


def test_a_search_is_lowered() -> None:
    found = lowered(Row("h100", TINY_CORPUS, False, (1, 8, 1), SEARCH))
    assert found["layers"] == 0
    assert found["float32_products"] == []
    assert found["asks_host"] == []
    assert found["model"] == "tiny-corpus"
