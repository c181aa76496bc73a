"""Hides torch from Python processes that have this folder on PYTHONPATH.

Python runs this file at its start. Users of the trainer have no torch. The tests have it as a
reference, but importing it takes seconds.
"""

from importlib.machinery import PathFinder

_find_spec = PathFinder.find_spec


def _without_torch(name, path=None, target=None):
    return None if name.partition(".")[0] == "torch" else _find_spec(name, path, target)


PathFinder.find_spec = staticmethod(_without_torch)  # type: ignore[method-assign]
