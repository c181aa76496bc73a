"""Opens the tokenizer of a model folder, with one kind of error for all that may be wrong with it.

The libraries that read it are two, one of them written in Rust, and raise many kinds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
MAX_BYTES = 512 * 2**20  # of such a file; the largest official ones have 0.04 GB


def auto_tokenizer() -> Any:
    """transformers' AutoTokenizer, imported without the advice to install PyTorch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # slow to import, so only when a folder is read

    return AutoTokenizer


def read_fast_tokenizer(folder: Path) -> Any:
    """The tokenizer as transformers has it, a fast one. Nothing is downloaded, no code is run."""
    for name in FILES:
        path = folder / name
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise InputError(
                f"{path}: has more than {MAX_BYTES >> 20} MiB, which no such file needs; download "
                "the model again."
            )
    try:
        # By default transformers asks on the terminal whether to run the folder's own code.
        found = auto_tokenizer().from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:
        # Rust's panics are no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
        raise InputError(f"{folder}: the tokenizer cannot be read ({reason}).") from None
    if not getattr(found, "is_fast", False):
        raise InputError(f"{folder}: there is no fast tokenizer; add its tokenizer.json.")
    longest = found.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float) or not longest > 0:
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: model_max_length is {longest!r:.60}; give a "
            "number above 0, or leave it out."
        )
    return found
