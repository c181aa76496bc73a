#!/usr/bin/env python3
"""An environment that speaks the lines of `verifiers_side`, without verifiers, for tests.

It stands where a Python is expected (config.env.python), and does what its argument `does` says.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

TASKS = 6
LOCK = threading.Lock()
WAITING: dict[int, Any] = {}
CALLS = [0]


def say(op: str, **fields: Any) -> None:
    with LOCK:
        print(json.dumps({"op": op, **fields}), flush=True)


def sample(episode: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    with LOCK:
        CALLS[0] += 1
        call = CALLS[0]
        arrived = threading.Event()
        WAITING[call] = [arrived, None]
    request = {"model": "policy", "messages": messages, "tools": [], "sampling": {}}
    say("sample", call=call, episode=episode, **request)
    arrived.wait()
    return {**WAITING[call][1], "call": call}


def assistant(reply: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": reply["content"], "tool_calls": reply["tool_calls"]}


def played(episode: int, calls: list[int], reward: Any, **more: Any) -> None:
    fields = {"truncated": False, "stop": "done", "parts": {"half": reward / 2}, "seconds": 0.0}
    fields["record"] = {"traces": [{"rewards": {"reward": {"score": reward}}}]}
    say("played", episode=episode, calls=calls, reward=reward, **fields, **more)


def play(given: dict[str, Any], asked: dict[str, Any], episode: int) -> None:
    does, marks = given["arguments"].get("does", "chat"), given["arguments"].get("marks", "")
    prompt = [{"role": "user", "content": f"Question {asked['task']}?"}]

    def fails(cause: str) -> None:
        failure = {"cause": cause, "message": f"the environment is {cause}"}
        say("played", episode=episode, seconds=0.0, calls=[], failure=failure)

    if does == "die" and first_time(marks):
        os._exit(3)
    if does == "hang":
        time.sleep(600)
    if does == "fail" and first_time(f"{marks}{asked['task']}"):
        return fails("own_code")
    if does in ("raised", "no_number"):
        return fails(does)
    if does == "served":
        return served(asked, episode)
    first = sample(episode, prompt)
    if does == "endless":
        while "over" not in first:
            prompt = [*prompt, assistant(first), {"role": "user", "content": "go on"}]
            first = sample(episode, prompt)
        return fails("endless")
    if "failure" in first:
        return say("played", episode=episode, seconds=0.0, calls=[], failure=first["failure"])
    answer = {"role": "tool", "tool_call_id": "x", "content": f"result {asked['task']}"}
    second = sample(episode, [*prompt, assistant(first), answer])
    reward = (len(second["ids"]) + asked["task"]) % 5 / 4
    return played(episode, [first["call"], second["call"]], reward)


def served(asked: dict[str, Any], episode: int) -> None:
    """An episode of one turn, which is asked for by HTTP; that of a later task begins later."""
    time.sleep(0.3 * asked["task"])
    request = urllib.request.Request(  # noqa: S310
        asked["served"]["url"].removesuffix("/v1") + "/inference/v1/generate",
        data=json.dumps({"token_ids": [5, 6], "sampling_params": {"max_tokens": 8}}).encode(),
        headers={
            "Authorization": f"Bearer {asked['served']['key']}",
            "X-Session-ID": f"{episode}-ab",
        },
    )
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        ids = json.load(reply)["choices"][0]["token_ids"]
    nodes = [
        {"parent": -1, "ids": [5, 6], "mask": [False, False], "trains": False},
        {"parent": 0, "ids": ids, "mask": [True] * len(ids), "trains": True},
    ]
    played(episode, [], 1.0, nodes=nodes)


def first_time(mark: str) -> bool:
    """Whether a file is not there yet; then it is."""
    if os.path.exists(mark):
        return False
    with open(mark, "w"):
        return True


def main() -> None:
    given = json.loads(sys.stdin.readline())
    does = given["arguments"].get("does", "chat")
    if does == "refuse":
        return say("refused", message="the environment cannot be used; name another")
    if does == "end":
        sys.exit("it ends at once")
    text = "half \ud800 a pair" if does == "surrogate" else "Question?"
    say(
        "opened",
        version="0",
        sizes={"train": TASKS, "eval": 2},
        prompts=[[{"role": "user", "content": text}]] * TASKS,
        digest=str(time.time()) if does == "changes" else "same",
        code=hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    )
    for line in sys.stdin:
        message = json.loads(line)
        if message["op"] == "play":
            for episode in message["episodes"]:
                threading.Thread(target=play, args=(given, message, episode), daemon=True).start()
        elif message["op"] == "sampled":
            WAITING[message["call"]][1] = message
            WAITING[message["call"]][0].set()
        elif message["op"] == "speaks":
            if message["on"]:
                first_time(f"{given['arguments']['marks']}{message['episode']}")
        else:
            return None
    return None


main()
os._exit(0)
