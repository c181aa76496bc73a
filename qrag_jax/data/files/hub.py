"""Reads the records of a data set from the Hugging Face hub when no local path is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qrag_jax.errors import InputError


def load_hub(repo: str, config: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Returns an iterator over the records of one split, downloaded once and then cached.

    Args:
        repo: hub name, e.g. "hotpotqa/hotpot_qa".
        config: the data set's configuration; None if it has only one.
        split: the hub's name of the split, e.g. "validation".

    Raises:
        InputError: the optional package `datasets` is missing, or the split cannot be loaded.
    """
    try:
        import datasets  # optional, slow to import
    except ImportError:
        raise InputError(
            f"data.path is empty and reading {repo} from the hub needs the package datasets: "
            "run pip install 'qrag_jax[hub]', or set data.path to a file or folder"
        ) from None
    try:
        table = datasets.load_dataset(repo, config, split=split)
    # All failures here (network, name, cache, disk) have the same remedy for the user.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"data.path is empty and split {split} of {repo} could not be had from the hub "
            f"({reason}); check the network, or set data.path to a file or folder"
        ) from None
    return iter(table)
