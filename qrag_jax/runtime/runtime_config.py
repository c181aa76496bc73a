"""Config section for the devices of a run and for splitting parameters over them."""

from __future__ import annotations

import dataclasses

from qrag_jax.runtime.sharding import ALL_SPLIT, Rules, check_rules, resolve


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """Section `runtime`.

    Raises:
        InputError: a sharding rule is malformed.
    """

    mesh: tuple[int, int, int] = (-1, 1, 1)  # devices along data, fsdp, tensor; -1: the rest
    # (regex, strategy) pairs; a parameter has the strategy of the first regex found in its name.
    # "model" follows the model's own rules, "fsdp" splits large arrays over the mesh axis fsdp
    # alone, "replicate" copies to every device. "column" and "row" split the outputs or inputs of a
    # map over the axis tensor; the model's own rules use them.
    sharding: tuple[tuple[str, str], ...] = ((".*", "model"),)
    # Programs of a GPU that give the same numbers every time, as a resumed run needs to end bit for
    # bit like one that was never stopped; it costs time there. A CPU's programs do so anyway.
    deterministic: bool = True

    def __post_init__(self) -> None:
        check_rules(self.sharding)

    def rules(self, own: Rules = ALL_SPLIT) -> Rules:
        """The (regex, strategy) pairs; the model's rules, `own`, replace the strategy "model"."""
        return resolve(self.sharding, own)
