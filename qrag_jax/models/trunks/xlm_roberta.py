"""XLM-RoBERTa (Conneau et al., 2020) and RoBERTa (Liu et al., 2019): BERT with shifted positions.

XLM-RoBERTa is the trunk of multilingual E5. The position table begins with unused rows, one for
each id up to the padding token's id, as in the models of Hugging Face and fairseq.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from qrag_jax.errors import InputError
from qrag_jax.models.trunks import bert
from qrag_jax.models.trunks.bert import BertConfig


@dataclasses.dataclass(frozen=True)
class XlmRobertaConfig(BertConfig):
    """Sizes of an XLM-R or RoBERTa encoder; the trunk is `bert.Bert`.

    `max_position_embeddings` also counts the unused first rows of the position table.
    """

    model_types: ClassVar[tuple[str, ...]] = ("xlm-roberta", "roberta")

    pad_token_id: int = 1

    @property
    def first_position(self) -> int:
        return self.pad_token_id + 1

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        result = super().from_dict(config, where)
        if result.longest_row < 1 or result.pad_token_id < 0:
            raise InputError(
                f"{where}: positions begin behind pad_token_id {result.pad_token_id}, but "
                f"max_position_embeddings is {result.max_position_embeddings}; copy both from the "
                "model's own config.json."
            )
        return result


XLM_ROBERTA_TABLE = dataclasses.replace(
    bert.TABLE,
    prefixes=("", "roberta.", "model.", "0.auto_model."),
    model_type="xlm-roberta",
    architecture="XLMRobertaModel",
)
ROBERTA_TABLE = dataclasses.replace(
    XLM_ROBERTA_TABLE, model_type="roberta", architecture="RobertaModel"
)
