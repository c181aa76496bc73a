"""The command `qrag`: `qrag NAME` runs `python -m qrag_jax.NAME`; `qrag` lists the commands."""

from __future__ import annotations

import runpy
import sys

from qrag_jax.runtime.commandline import lasting_output

COMMANDS = {
    "train": "train a retriever, or go on with a training that was interrupted",
    "evaluate": "score a run against the untrained one, or on long documents; tune when to stop",
    "sweep": "train and score one experiment with several seeds and settings, and compare them",
    "predict": "let a language model answer with tools, or write queries, and keep what it did",
    "show": "show runs on one page of HTML: learning curves, episodes step by step",
    "filter_data": "find the questions whose reward varies, to train an agent's retriever on",
    "answer": "have a language model answer with the chunks taken, and score the answers",
    "export": "write the towers as sentence-transformers models",
    "index": "embed a corpus, so that it can be searched",
    "search": "search an index, in several steps with a trained retriever",
    "data": "check a data file before a training does, or write it in the neutral schema",
    "serve": "serve a search over HTTP, or as a tool over MCP",
    "serve_llm": "serve a language model for trainers on other terminals",
}
HELP = ("--help", "-h", "help")


def main() -> int:
    name, *_ = [*sys.argv[1:], "--help"]
    if name in HELP:
        width = max(map(len, COMMANDS))
        with lasting_output():  # `| head` closes it
            print("qrag NAME --flag=value …   (or python -m qrag_jax.NAME)\n")
            for command, line in COMMANDS.items():
                print(f"  {command.ljust(width)}  {line}")
            print("\nqrag NAME --help lists a command's flags; qrag --version says which it is.")
        return 0
    if name == "--version":
        from qrag_jax import __version__

        print(f"qrag_jax {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"error: {name!r} is no command; use one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    del sys.argv[1]
    runpy.run_module(f"qrag_jax.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
