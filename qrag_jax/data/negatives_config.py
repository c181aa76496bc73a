"""Which passages of an index are added to the training questions' own."""

from __future__ import annotations

import dataclasses

from qrag_jax.errors import InputError, check_least


@dataclasses.dataclass(frozen=True)
class NegativesConfig:
    """Section `data.negatives`.

    A retriever that is trained on a question's few own passages meets a whole corpus later. Mined
    negatives are the passages of that corpus which a search takes for the right ones, such as in
    ANCE (arXiv 2007.00808) and DPR (arXiv 2004.04906).

    Raises:
        InputError: a field is too low, or nothing is there to be searched.
    """

    index: str = ""  # folder that qrag_jax.index wrote; "": no passages are added
    # What searches the index: a run's or an export's folder (steps, as it was trained), another
    # encoder's folder, or "minilm". "": words are compared.
    search: str = ""
    count: int = 10  # passages added to every training question
    skip: int = 0  # best ones left out first, where many good passages have no label

    def __post_init__(self) -> None:
        check_least("data.negatives", self, count=1, skip=0)
        if self.search and not self.index:
            raise InputError(
                "config.data.negatives.search is given without an index to search; give its folder "
                "as config.data.negatives.index, or leave both out."
            )
