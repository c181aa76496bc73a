"""Optional libraries of engines."""

from __future__ import annotations

import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.libraries import engine_library


def test_a_missing_library_is_named() -> None:
    assert engine_library("json", "json", "json").loads("1") == 1
    with pytest.raises(InputError, match=r"need the package a-b: run pip install 'qrag_jax\[c\]'"):
        engine_library("no_module_of_this_name", "a-b", "c")
