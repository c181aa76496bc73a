"""Finds what prompts have in common at their beginnings, so that it is read once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


def shared_prefixes(prompts: Sequence[np.ndarray], most: int, chunk: int) -> list[tuple[int, int]]:
    """Cuts sorted prompts into runs, each with a prefix that all of its prompts have.

    Prefixes are read side by side, and then the rests of all prompts, so the longest of each count.
    The longest rest gets as few chunks as so many runs allow.

    Args:
        prompts: ids `[n]`, none of them empty, different, those with a common prefix side by side.
        most: runs.
        chunk: tokens that are read at a time.

    Returns:
        For each run its number of prompts and the length of its prefix; each prompt has a token
        behind it. Where prefixes would save nothing, one run without a prefix.
    """
    if not prompts:
        return []
    lengths = [len(prompt) for prompt in prompts]
    common = [_common(one, two) for one, two in itertools.pairwise(prompts)]
    whole = _chunks(max(lengths), chunk)
    for few in range(1, whole):
        runs = _runs(lengths, common, few * chunk, most)
        if runs is not None:
            shared = _chunks(max(prefix for _, prefix in runs), chunk)
            if most * shared + len(prompts) * few < len(prompts) * whole:
                return runs
            break
    return [(len(prompts), 0)]


def _chunks(tokens: int, chunk: int) -> int:
    return -(-tokens // chunk)


def _runs(
    lengths: Sequence[int], common: Sequence[int], longest: int, most: int
) -> list[tuple[int, int]] | None:
    """Runs whose rests have at most so many tokens; None: there are more than `most`."""
    runs, first = list[tuple[int, int]](), 0
    while first < len(lengths):
        if len(runs) == most:
            return None
        # A part of a run has no longer rests than the run, so the longest runs are the fewest.
        end, prefix = first + 1, lengths[first] - 1
        reach = lengths[first]
        while end < len(lengths):
            shorter = min(prefix, common[end - 1], lengths[end] - 1)
            if max(reach, lengths[end]) - shorter > longest:
                break
            prefix, reach, end = shorter, max(reach, lengths[end]), end + 1
        runs.append((end - first, prefix))
        first = end
    return runs


def _common(one: np.ndarray, two: np.ndarray) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(one), len(two))
    differs = np.flatnonzero(one[:shorter] != two[:shorter])
    return int(differs[0]) if len(differs) else shorter
