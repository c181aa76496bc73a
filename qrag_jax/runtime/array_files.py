"""Maps arrays in files of NumPy's format, with one kind of error for all that may be wrong."""

from __future__ import annotations

import tokenize
from pathlib import Path

import numpy as np


def mapped_array(path: Path) -> np.ndarray:
    """The array of a `.npy` file, mapped: nothing of it is read before it is looked at.

    NumPy reads the header as Python's text, and a broken one fails in many ways.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it is damaged, or no such file, or holds objects of Python.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (
        *(tokenize.TokenError, SyntaxError, TypeError, AttributeError, LookupError),
        *(EOFError, MemoryError, OverflowError, RecursionError),
    ) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__})") from None
