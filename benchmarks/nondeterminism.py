"""Finds in the HLO text of a GPU's program what may give other numbers in every run.

Threads of a GPU add in the order in which they arrive. XLA can make a program without that
(`qrag_jax.runtime.determinism`): it then sorts what a scatter adds and says that each index is
there once. cuDNN's gradients of attention say `force_deterministic` themselves
(`qrag_jax.models.compute.cudnn_gradient`): a program in which two equal ones do not cannot start.
"""

from __future__ import annotations

import re

# Compiled programs have % before names, lowered ones have none.
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{\s*$")
_ROOT = re.compile(r"^\s*ROOT %?[\w.-]+ = \S+ ([\w-]+)\(")
_SCATTER = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) scatter\(.*to_apply=%?([\w.-]+)")
_BACKWARD = re.compile(
    r'^\s*(?:ROOT )?%?([\w.-]+) = .*custom_call_target="__cudnn\$fmha\w*Backward"'
)
_MARKED = re.compile(r"\bforce_deterministic\W+true\b")
_FLOAT = re.compile(r"\b(?:f|bf)\d+")  # sums of integers are the same in any order
_ROUNDED = {"add", "subtract", "multiply"}


def nondeterministic(text: str) -> list[str]:
    """Names of the instructions whose results depend on the order of a GPU's threads.

    Args:
        text: the program, compiled or lowered.

    Returns:
        Scatters that add floats where an index may be there twice, and gradients of attention that
        are not marked as deterministic. Scatters that only put values in place are not among them:
        this package writes no place twice.
    """
    roots, computation = {}, ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            computation = head[1]
        elif root := _ROOT.match(line):
            roots[computation] = root[1]
    found = []
    for line in text.splitlines():
        if (scatter := _SCATTER.match(line)) and "unique_indices=true" not in line:
            name, kind, combined = scatter.groups()
            if _FLOAT.search(kind) and roots.get(combined) in _ROUNDED:
                found.append(name)
        elif (backward := _BACKWARD.match(line)) and not _MARKED.search(line):
            found.append(backward[1])
    return found
