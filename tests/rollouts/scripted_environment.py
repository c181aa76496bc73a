#!/usr/bin/env python3
"""An environment that speaks the lines of `verifiers_side`, without verifiers, for tests.

It stands where a Python is expected (config.env.python), and does what its argument `does` says.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

TASKS = 6
LOCK = threading.Lock()


def say(op: str, **fields: Any) -> None:
    with LOCK:
        print(json.dumps({"op": op, **fields}), flush=True)


NUMBERS, ANSWERS = itertools.count(), dict[int, queue.SimpleQueue[dict[str, Any]]]()


def ask(op: str, **fields: Any) -> dict[str, Any]:
    """What the trainer answers; ValueError if it answers with an error."""
    number = next(NUMBERS)
    ANSWERS[number] = queue.SimpleQueue()
    say(op, call=number, **fields)
    answer = ANSWERS[number].get()
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def play(given: dict[str, Any], asked: dict[str, Any]) -> None:
    does, marks = given["arguments"].get("does", "chat"), given["arguments"].get("marks", "")
    episode, task = asked["episode"], asked["task"]

    def fails(cause: str, message: str = "") -> None:
        failure = {"cause": cause, "message": message or f"the environment is {cause}"}
        say("played", episode=episode, failure=failure)

    content: Any = f"Question {task}?"
    if does == "image":
        content = [{"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "user", "content": content}]

    def turn(before: Any = None, *tail: dict[str, str]) -> dict[str, Any]:
        asked = {"messages": messages, "tools": [], "before": before, "tail": tail}
        return ask("turn", episode=episode, sampling={"temperature": 1.0}, **asked)

    if does == "die" and first_time(marks):
        os._exit(3)
    if does == "hang":
        time.sleep(600)
    if does == "fail" and first_time(f"{marks}{task}"):
        return fails("own_code")
    if does in ("raised", "no_number"):
        return fails(does)
    try:
        first = turn()
        output = {"role": "tool", "tool_call_id": "x", "content": f"result {task}"}
        second = turn((first["prompt"], first["ids"]), output)
    except ValueError as error:
        return fails("connection", str(error))
    nodes, end = [], 0
    for number, said in enumerate((first, second)):
        read = said["prompt"][end:]
        end = len(said["prompt"]) + len(said["ids"])
        mask = [False] * len(read) + [True] * len(said["ids"])
        node = {"parent": number - 1, "ids": read + said["ids"], "mask": mask, "trains": True}
        nodes.append(node | {"log_probs": said["log_probs"]})
    reward = (len(second["ids"]) + task) % 5 / 4
    record = {"traces": [{"rewards": {"reward": {"score": reward}}}]}
    values = {"reward": reward, "parts": {"half": reward / 2}, "record": record, "nodes": nodes}
    return say("played", episode=episode, stop="done", truncated=False, **values)


def first_time(mark: str) -> bool:
    """Whether a file is not there yet; then it is."""
    is_new = not os.path.exists(mark)
    with open(mark, "w"):
        return is_new


def main() -> None:
    given = json.loads(sys.stdin.readline())
    does = given["arguments"].get("does", "chat")
    if does == "refuse":
        return say("refused", message="the environment cannot be used; name another")
    if does == "end":
        sys.exit("it ends at once")
    say(
        "opened",
        version="0",
        tasks=TASKS,
        prompts=[[{"role": "user", "content": "Question?"}]] * TASKS,
        digest=str(time.time()) if does == "changes" else "same",
        code=hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    )
    for line in sys.stdin:
        message = json.loads(line)
        if message["op"] == "play":
            threading.Thread(target=play, args=(given, message), daemon=True).start()
        else:
            ANSWERS[message["call"]].put(message)
    return None


main()
os._exit(0)
