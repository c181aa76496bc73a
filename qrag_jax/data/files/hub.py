"""Reads the records of a data set from the Hugging Face hub when no local path is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from qrag_jax.errors import InputError

MARK = "hub:"


class HubPath(NamedTuple):
    """A data set of the hub, as a path that a user writes: `hub:NAME[,CONFIG[,SPLIT]]`.

    Attributes:
        config: the data set's configuration; None if it has only one.
        split: the hub's name of the split that is read for everything; None: each split is read
            by its own name.
    """

    repo: str
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, path: str) -> HubPath | None:
        """The data set that a path names; None: it is a file or folder."""
        if not path.startswith(MARK):
            return None
        repo, *rest = (part.strip() for part in path.removeprefix(MARK).split(","))
        if not repo or len(rest) > 2:
            raise InputError(
                f"data.path is {path!r}; write {MARK}NAME, {MARK}NAME,CONFIG or "
                f"{MARK}NAME,CONFIG,SPLIT"
            )
        return cls(repo, *(part or None for part in rest))


def load_hub(repo: str, config: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Returns an iterator over the records of one split, downloaded once and then cached.

    Args:
        repo: hub name, e.g. "hotpotqa/hotpot_qa".
        config: the data set's configuration; None if it has only one.
        split: the hub's name of the split, e.g. "validation".
    """
    try:
        import datasets  # optional, slow to import
    except ImportError:
        raise InputError(
            f"reading {repo} from the hub needs the package datasets: run pip install "
            "'qrag_jax[hub]', or set data.path to a file or folder"
        ) from None
    try:
        table = datasets.load_dataset(repo, config, split=split)
    # All failures here (network, name, cache, disk) have the same remedy for the user.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"split {split} of {repo} could not be had from the hub ({reason}); check the name and "
            "the network, or set data.path to a file or folder"
        ) from None
    return iter(table)
