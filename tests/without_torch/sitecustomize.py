"""Python runs this file at its start where the folder is on PYTHONPATH: torch is then not there.

Users of the trainer have no torch; it is here as the tests' reference, and takes seconds to import.
"""

from importlib.machinery import PathFinder

_find_spec = PathFinder.find_spec


def _without_torch(name, path=None, target=None):
    return None if name.partition(".")[0] == "torch" else _find_spec(name, path, target)


PathFinder.find_spec = staticmethod(_without_torch)  # type: ignore[method-assign]
