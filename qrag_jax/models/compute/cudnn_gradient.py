"""Lets a deterministic program have several equal gradients of cuDNN's attention.

XLA writes the wish for a deterministic algorithm into the first of equal calls only, and then finds
no kernel for the others: such a program ends with an IndexError as it starts (openxla/xla, pull
request 46500). PPO's update is one, with its policy and its critic. So each call says it from the
start, in the field that XLA itself would write.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from qrag_jax.runtime import determinism

MADE_BY = "create_dot_product_attention_backend_config"  # in the module of JAX that lowers calls
_FIELDS, _OF_GRADIENTS = "cudnn_fmha_backend_config", "bmm1_grad_gemm1_dot_dimension_numbers"


def say_determinism() -> None:
    """From now on calls are lowered with the field, if XLA is asked for deterministic programs.

    JAX has no public way to set it. A version without the function that is wrapped here is left as
    it is.
    """
    from jax._src.cudnn import fused_attention_stablehlo as lowering

    made = getattr(lowering, MADE_BY, None)
    if made is None or hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def with_field(*args: Any, **options: Any) -> str:
        text: str = made(*args, **options)
        config = json.loads(text)
        fields = config.get(_FIELDS, {})
        # As XLA would write it: with another value the first of equal calls would differ again.
        if _OF_GRADIENTS not in fields or not determinism.is_asked():
            return text
        fields["force_deterministic"] = True
        return json.dumps(config)

    setattr(lowering, MADE_BY, with_field)
