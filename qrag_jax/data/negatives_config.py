"""Which passages of an index are added to the training questions' own."""

from __future__ import annotations

import dataclasses

from qrag_jax.errors import check_least


@dataclasses.dataclass(frozen=True)
class NegativesConfig:
    """Section `data.negatives`.

    A retriever that is trained on a question's few own passages meets a whole corpus later. Mined
    negatives are the passages of that corpus which a search takes for the right ones, such as in
    ANCE (arXiv 2007.00808) and DPR (arXiv 2004.04906).

    Raises:
        InputError: a field is too low.
    """

    index: str = ""  # folder that qrag_jax.index wrote; "": no passages are added
    # What searches the index: a run's or an export's folder (steps, as it was trained), another
    # encoder's folder, or "minilm". "": words are compared.
    search: str = ""
    count: int = 10  # passages added to every training question
    skip: int = 0  # best ones left out first, where many good passages have no label

    def __post_init__(self) -> None:
        check_least("data.negatives", self, count=1, skip=0)
