"""The smallest run of every system, and what tests of several systems do with one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from configs import harr_grpo, hotpotqa
from examples import bandit
from qrag_jax import systems
from qrag_jax.environments.episode import Look, Said, Speak, ToolTask
from qrag_jax.rollouts.token_episodes import Episode, Speech, Talk, encoded
from qrag_jax.runtime.run import Run
from qrag_jax.systems.deepretrieval import config as deepretrieval_config
from qrag_jax.systems.leret import config as leret_config
from qrag_jax.systems.rlvr import config as rlvr_config
from tests.support import worlds

HARR_MEMBERS = 4
SMALL_LM: dict[str, Any] = {
    **{"layers": 1, "hidden": 32, "heads": 2, "key_heads": 1, "head_dim": 16},
    **{"weights": "", "intermediate": 32, "vocab": 420},
}


def with_fields(config: ConfigDict, fields: Mapping[str, Any]) -> ConfigDict:
    """The config with these fields, named as `section__field`."""
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in fields.items()}
    )
    return config


def small_q_rag(**fields: Any) -> ConfigDict:
    config = hotpotqa.get_config("tiny").unlock()
    config.encoder.scratch.update(layers=1, hidden=16, vocab=300)
    config.encoder.update(length_buckets=1, block_sizes=1, dtype="float32")
    config.data.path = worlds.path_of("few_hotpotqa")
    config.imitate.update(steps=4, batch_size=8, learning_rate=1e-2)
    config.stages = ("imitate", "pqn")
    config.train.update(steps=2, batch_size=8, accumulation=1, eval_every=6, checkpoint_every=2)
    config.train.log_every = 1
    config.eval.update(samples=8, batch_size=8)
    return with_fields(config, fields)


def small_harr(algorithm: str = "grpo", **fields: Any) -> ConfigDict:
    config = harr_grpo.default_config(algorithm, "own")
    config.encoder.path, config.encoder.lora.rank = "", 0
    config.encoder.scratch.update(layers=1, hidden=16, heads=2, vocab=300, positions=160)
    config.data.path = worlds.path_of("few_chains")
    config.data.max_chunk_tokens = 64
    config.state.update(max_tokens=96, instruction=False)
    config.encoder.update(pooling="mean", length_buckets=1, block_sizes=1, dtype="float32")
    config.policy.update(pool=10, passages=2)
    config.agent.max_hops = 3
    config[algorithm].members = HARR_MEMBERS
    config.reward.mixture = "f1=1,recall=1,novelty=0.2"
    config.optimizer.learning_rate = 1e-3
    config.train.update(steps=4, batch_size=2, eval_every=2, checkpoint_every=2)
    config.eval.samples = 6
    return with_fields(config, fields)


def small_rlvr(**fields: Any) -> ConfigDict:
    config = rlvr_config.default_config()
    config.model.tiny.update(SMALL_LM, positions=700)
    config.questions.update(bridge_train=16, bridge_dev=4)
    config.eval.part = "all"
    config.tools.update(prompt="bare_question", top_n=1, most=1, max_turns=3, turn_tokens=16)
    config.sampling.update(room=640, chunk=64)
    config.sft.update(steps=2, batch_size=4)
    config.grpo.update(members=3, longest=64)
    config.train.update(steps=2, batch_size=2, eval_every=2, checkpoint_every=1, log_every=1)
    return with_fields(config, fields)


def small_leret(**fields: Any) -> ConfigDict:
    config = leret_config.default_config()
    config.model.tiny.update(SMALL_LM, positions=256)
    config.model.block_tokens = 1024
    config.questions.update(bridge_train=6, bridge_dev=3, bridge_corpus=6)
    config.search.update(stemmer="", stop_words="", gold_by="passage")
    config.writing.update(prompt="bare_query", k=4, passage_words=8, query_tokens=40)
    config.styles.most_words = 4
    config.pairs.degenerate = ("[1]",)
    config.tries.update(prompts=2, samples=4, questions=3)
    config.sampling.update(room=256, chunk=64, rows=32)
    config.script.update(steps=12, batch_size=4, learning_rate=2e-2)
    config.sft.update(steps=2, batch_size=4)
    config.preference.update(steps=2, batch_size=4)
    config.train.update(eval_every=100, checkpoint_every=1, log_every=1)
    config.optimizer.warmup_steps = 1
    return with_fields(config, fields)


def small_deepretrieval(**fields: Any) -> ConfigDict:
    config = deepretrieval_config.default_config()
    config.model.tiny.update(SMALL_LM, positions=512)
    config.model.block_tokens = 1024
    config.queries.update(made_train=6, made_test=4, held_out=3, made_corpus=25, clauses=1)
    config.writing.update(prompt="bare_rewrite", query_tokens=24)
    config.sampling.update(temperature=1.0, room=448, chunk=64, rows=32)
    config.script.update(steps=2, batch_size=4, learning_rate=2e-3)
    config.ppo.kl = 0.01
    config.grpo.update(members=2, longest=24)
    config.train.update(steps=2, batch_size=4)
    config.train.update(eval_every=100, checkpoint_every=1, log_every=1)
    config.optimizer.learning_rate = 1e-3
    return with_fields(config, fields)


BANDIT = "examples/bandit.py"  # a system outside the package


def small_bandit(**fields: Any) -> ConfigDict:
    config = bandit.get_config()
    config.train.update(steps=6, eval_every=6, checkpoint_every=2, log_every=1)
    return with_fields(config, fields)


# Of every system its smallest config; a new system is tested by its line here.
SMALL: Mapping[str, Callable[..., ConfigDict]] = {
    "q_rag": small_q_rag,
    "harr": small_harr,
    "rlvr": small_rlvr,
    "leret": small_leret,
    "deepretrieval": small_deepretrieval,
    BANDIT: small_bandit,
}


@contextlib.contextmanager
def opened_run(config: ConfigDict, workdir: Path, **how: Any) -> Iterator[tuple[Any, Run]]:
    """The system of a run in `workdir` on all devices, and the run."""
    kind = systems.check(config)
    with Run.open(workdir, 0.0) as run, kind.open_system(config, run, **how) as system:
        yield system, run


@contextlib.contextmanager
def opened_alone(config: ConfigDict, workdir: Path) -> Iterator[tuple[Any, Run]]:
    """The same as on a machine of one device, for which programs are compiled sooner."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            first = jax.devices()[:1]
            patch.setattr(jax, "devices", lambda: first)
            patch.setattr(jax, "local_devices", lambda: first)
            both = stack.enter_context(opened_run(config, workdir))
        yield both


@contextlib.contextmanager
def opened(config: ConfigDict, workdir: Path) -> Iterator[Any]:
    """The system alone, on one device."""
    with opened_alone(config, workdir) as (system, _):
        yield system


def said(agent: Any, library: Any, speech: Speech, task: ToolTask, text: str) -> Episode:
    """The episode of a model that writes `text`."""
    play = agent.play(task)
    asked: Any = next(play)
    assert isinstance(asked, Speak)
    messages, reply = asked.messages, Said(text, "stop")
    try:
        while True:
            asked = play.send(reply)
            assert isinstance(asked, Look)
            (reply,) = library.look([(task, asked)])
    except StopIteration as end:
        return encoded(Talk(end.value, ((messages, text),)), speech)
