"""Command-line flags: the experiment, the run that a command reads, and what searches an index."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_collections
from absl import flags
from ml_collections import config_flags
from ml_collections.config_flags import tuple_parser

from qrag_jax import systems as registry
from qrag_jax.errors import InputError
from qrag_jax.llm.config import OF_VLLM
from qrag_jax.runtime import commandline, config_fields, own_code, writers

if TYPE_CHECKING:
    from qrag_jax.systems.config import SystemConfig
    from qrag_jax.systems.retriever import Retriever

# Fields that may name a file of Python that runs when the data are read or episodes are played.
CODE_FIELDS = (
    *("data.path", "eval.path", "agent.path", "rubric.path", "tools.path"),
    *("data.sources.babilong.noise", "data.sources.niah.noise"),
)
# Fields that name an environment, which is code, and the program that runs it.
PROGRAM_FIELDS = ("env.verifiers", "env.python")
# Fields of a server that is started, with the values that anybody may have.
_OF_SERVER: dict[str, Any] = {"llm.server.python": OF_VLLM, "llm.server.arguments": ()}


def _is_ours(system: str) -> bool:
    return registry.SYSTEMS.get(system, "").startswith("qrag_jax.")


def config_of(system: str) -> type[SystemConfig]:
    """The layout of a system's config, whose module alone is imported; the first's from outside."""
    name = system if _is_ours(system) else next(iter(registry.SYSTEMS))
    return importlib.import_module(f"{registry.__name__}.{name}.config").CONFIG


def takers(what: str, name: str) -> list[str]:
    """The systems that name a command or a flag in `COMMANDS`, `UNTRAINED` or `FLAGS`."""
    return [system for system in registry.SYSTEMS if name in getattr(config_of(system), what)]


def refuse_flags(names: Sequence[str], system: str) -> None:
    """Refuses flags that this system does not read, each of which is for some systems alone."""
    present = (name for name in names if flags.FLAGS[name].present)
    commandline.refuse_unread({name: takers("FLAGS", name) for name in present}, system, "runs of ")


class _NamesParser(tuple_parser.TupleParser):
    """Reads a field of several values as the library does, and names with commas between as well.

    Other texts with commas stay one value, such as a word of a server's command line.
    """

    _NAMES = re.compile(r"[A-Za-z_][\w@]*(, *[A-Za-z_][\w@]*)+")

    def parse(self, argument: Any) -> tuple[Any, ...]:
        values = super().parse(argument)
        if values == ("",):  # --config.log.to=
            return ()
        if values == (argument,) and isinstance(argument, str) and self._NAMES.fullmatch(argument):
            return tuple(name.strip() for name in argument.split(","))
        return values


config_flags.register_flag_parser_for_type(tuple, _NamesParser())


def define_experiment() -> flags.FlagHolder:
    return config_flags.DEFINE_config_file("config", None, "Experiment, FILE or FILE:VARIANT.")


def fields_help(argv: Sequence[str]) -> str:
    """Every field of a config with its comment and its value: the experiment's, or the default."""
    file, values = argument(argv, "config"), {}
    if file:
        parser = config_flags.config_flags.ConfigFileFlagParser(name="config")
        values = config_fields.flat(parser.parse(file).to_dict())
    of_system = config_of(values.get("system", ""))
    unread = tuple(f"{field}." for field in of_system.unread(values)) if file else ()
    lines = [f"Fields of the experiment{f' {file}' if file else ''}, --config.FIELD=VALUE:", ""]
    for name, value, comment in config_fields.described(of_system, ""):
        absent = file and (name not in values or f"{name}.".startswith(unread))
        lines.append(f"  {name}={values.get(name, value)!r}{' (not read)' if absent else ''}")
        lines += textwrap.wrap(comment, 92, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def unread_words(argv: Sequence[str], config: ml_collections.ConfigDict) -> list[str]:
    """The words of the command line that set fields which a run with this config does not read."""
    system, values = config.get("system", ""), config_fields.flat(config.to_dict())
    unread = [f"{name}." for name in config_of(system).unread(values)] if _is_ours(system) else []
    fields = {word: word.partition("=")[0].removeprefix("--config.") for word in argv}
    return [word for word, name in fields.items() if f"{name}.".startswith(tuple(unread))]


def given_experiment(holder: flags.FlagHolder | flags.Flag) -> ml_collections.ConfigDict:
    try:
        config = holder.value
        _ = config is None or config.get("seed")  # a bad file fails at its first use
    except OSError as error:
        path = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")[0]
        if not Path(path).exists():
            raise InputError(f"--config: {path} is not there; {own_code.instead(path)}") from None
        reason = str(error).strip().split("\n")[-1].strip()
        raise InputError(f"--config: the file cannot be loaded ({reason}).") from None
    if config is None:
        raise InputError(f"give an experiment, --config=FILE: {own_code.instead('')}")
    return config


def experiment_of(words: Sequence[str]) -> ml_collections.ConfigDict:
    """The experiment of a command line that is not this process's own; it is not checked."""
    return _parsed(config_flags.DEFINE_config_file, words)


def with_fields(
    config: ml_collections.ConfigDict, words: Sequence[str]
) -> ml_collections.ConfigDict:
    """A run's config, changed by the fields of a command line that is not this process's own."""
    _refuse_unnamed_code(config, words)
    return _parsed(config_flags.DEFINE_config_dict, words, config=config, lock_config=True)


def _parsed(define: Any, words: Sequence[str], **how: Any) -> ml_collections.ConfigDict:
    argv, values = own_code.resolved(["train", *words]), flags.FlagValues()
    holder = define("config", flag_values=values, sys_argv=argv, **how)
    try:
        values(argv)
        return given_experiment(holder)
    except InputError:
        raise
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(commandline.sentence(error, argv)) from None


def given_checkpoint() -> str:
    return flags.FLAGS.checkpoint if flags.FLAGS["checkpoint"].present else ""


def argument(argv: Sequence[str], name: str) -> str | None:
    """The value of `--name=value` or `--name value`, read before absl knows the config."""
    return next((value for _, value in own_code.flag_values(argv, name)), None)


def experiment_or_run(command: str) -> tuple[Path | None, ml_collections.ConfigDict]:
    """The run's folder and its config, or an experiment of a system whose `UNTRAINED` has this."""
    if flags.FLAGS.workdir:
        return Path(flags.FLAGS.workdir), flags.FLAGS.config
    if flags.FLAGS["checkpoint"].present:
        raise InputError("--checkpoint is of a run; give its folder with --workdir.")
    config = given_experiment(flags.FLAGS["config"])
    if config.get("system") not in (known := takers("UNTRAINED", command)):
        raise InputError(
            f"--config is an experiment of {config.get('system')}, which qrag {command} does not "
            f"play untrained; give one of {' or '.join(known)}, or a run by --workdir."
        )
    return None, config


def define(
    argv: Sequence[str],
    command: str = "",
    checkpoints: Sequence[str] = ("best", "last"),
    *,
    plays: bool = True,
    outside: bool = False,
    or_experiment: bool = False,
) -> None:
    """Defines the flags; `--config` is the run's saved config, updated by `--eval_config`.

    Args:
        command: its name in `SystemConfig.COMMANDS`; "": it is for all systems.
        outside: whether it is for systems from outside the package, too.
        checkpoints: what `--checkpoint` may name; the first is the default.
        plays: whether the command reads the run's data, or plays episodes.
        or_experiment: without `--workdir`, `--config` is an experiment.
    """
    folder, file = argument(argv, "workdir"), argument(argv, "eval_config")
    if or_experiment and folder is not None and argument(argv, "config") is not None:
        raise InputError("--workdir has a config; leave out --config=FILE.")
    flags.DEFINE_string("workdir", None, "Folder of a trained run.")
    flags.DEFINE_enum("checkpoint", checkpoints[0], [*checkpoints], "Which checkpoint.")
    if or_experiment and folder is None:
        define_experiment()
        return
    flags.DEFINE_string("eval_config", None, "Config FILE whose fields replace the run's.")
    if outside:
        flags.DEFINE_string("system", None, "FILE.py or module of a system of your own; it is run.")
    if commandline.HELP & set(argv):
        return
    if folder is None:
        raise InputError("give the folder of a trained run, for example --workdir=runs/hotpotqa.")
    path = Path(folder) / config_fields.CONFIG_NAME
    if checkpoints[0] == "best" and argument(argv, "checkpoint") is None:
        _refuse_unscored(Path(folder))
    from qrag_jax.systems.config import load_config  # which imports jax

    config = load_config(path)
    if not _is_ours(system := config.system) and outside:
        registry.register(system, argument(argv, "system") or "")
    elif not _is_ours(system) or (command and command not in config_of(system).COMMANDS):
        known = takers("COMMANDS", command) if command else [*registry.SYSTEMS]
        raise InputError(f"{folder} is of {system}; qrag {command} is for {' or '.join(known)}.")
    if file:
        _replace_fields(config, file)
    if plays:
        _refuse_unnamed_code(config, argv)
    config_flags.DEFINE_config_dict("config", config, lock_config=True)


def _refuse_unscored(workdir: Path) -> None:
    """Refuses to take the untrained weights for the best of a run that scored no others."""
    best = [folder.name for folder in workdir.glob("checkpoints/best/[0-9]*")]
    if best == ["0"] and not writers.has_evaluation(workdir):
        raise InputError(
            f"{workdir} has no evaluation of trained weights yet, so none are its best; give "
            "--checkpoint=last, train on, or give --checkpoint=best for the untrained weights."
        )


def _refuse_unnamed_code(config: ml_collections.ConfigDict, argv: Sequence[str]) -> None:
    """Refuses to run code because a folder of a run says so: folders are not trusted."""
    values = config_fields.flat(config.to_dict())
    # Evaluations that ask a language model start its server if it has no address.
    layout = config_of(values["system"]) if _is_ours(values["system"]) else None
    starts = layout and layout.EVALUATED_BY_MODEL and "llm" not in layout.unread(values)
    usual = _OF_SERVER if starts and not values["llm.url"] else {}
    for name in (*CODE_FIELDS, *PROGRAM_FIELDS, *usual):
        spec = values.get(name)
        runs = spec and spec != usual.get(name)
        if name in CODE_FIELDS:
            runs = spec and own_code.names_foreign(str(spec))
        if runs and argument(argv, f"config.{name}") is None:
            raise InputError(
                f"the run's config names the code {spec}, which is not run because a folder says "
                f"so; if you trust it, give --config.{name}={spec}."
            )


def _replace_fields(config: ml_collections.ConfigDict, file: str) -> None:
    """Replaces fields of `config` by those of the config `file`; the sources all at once."""
    parser = config_flags.config_flags.ConfigFileFlagParser(name="eval_config")
    try:
        fields, saved = parser.parse(file), config.copy_and_resolve_references()
        if (other := fields.get("system", config.system)) != config.system:
            raise ValueError(f"it is an experiment of {other}; give one of {config.system}")
        if "sources" in fields.get("data", {}):
            del config.data.sources
            config.data.sources = fields.data.sources
        config.lock().update(fields)
        config_of(config.system).fill_open(config, saved)  # FILE may leave these fields open
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[-1].strip().removeprefix("ValueError: ")
        raise InputError(f"--eval_config={file}: {reason}") from None


# ---------------------------------------------------------------- what searches
# A run (`--workdir`), an export (`--retriever`), a plain encoder (`--encoder`), or none of them:
# then words are compared. Nothing of this needs jax.

RUN, EXPORT, PLAIN, WORDS = SEARCHES = ("--workdir", "--retriever", "--encoder", "words alone")
# Flag → the searches that read it.
READ_BY_SEARCH: Mapping[str, tuple[str, ...]] = {
    "checkpoint": (RUN,),
    "compute": (RUN, EXPORT, PLAIN),
    "bm25_weight": (RUN, EXPORT),
    **dict.fromkeys(("question_prefix", "chunk_prefix", "max_chunk_tokens", "pooling"), (PLAIN,)),
}


def define_search(_: Sequence[str]) -> None:
    """Defines the flags that say which index is searched, and by what (`SEARCHES`)."""
    from qrag_jax.retrieval.index_folder import ENGINES

    flags.DEFINE_string("index", None, "Folder of the index, which qrag index wrote.")
    flags.DEFINE_string("workdir", None, "Folder of a trained run.")
    flags.DEFINE_string("retriever", None, "Folder of an exported run.")
    flags.DEFINE_string("encoder", None, "Plain encoder: folder, hub name, or minilm.")
    flags.DEFINE_enum("engine", "", ["", *ENGINES], "What searches it; none: the usual.")
    flags.DEFINE_string("server", "", "With --engine: URL of its server; none: as in qrag index.")
    flags.DEFINE_enum("checkpoint", "", ["", "best", "last"], "With --workdir.")
    flags.DEFINE_enum("compute", "auto", ["auto", "float32", "bfloat16"], "dtype of jax.")
    flags.DEFINE_float("bm25_weight", 0.0, "Of BM25 in the scores of each step.", lower_bound=0)
    flags.DEFINE_string("question_prefix", "", "With --encoder: text before questions.")
    flags.DEFINE_string("chunk_prefix", "", "With --encoder: as in qrag index.")
    flags.DEFINE_integer("max_chunk_tokens", 0, "With --encoder: as in index.", lower_bound=0)
    flags.DEFINE_string("pooling", "", "With --encoder: as in qrag index.")


def search_kind(further: Mapping[str, tuple[str, ...]] | None = None) -> str:
    """Which of `SEARCHES` is asked for."""
    names = [name for name in SEARCHES[:-1] if flags.FLAGS[name.removeprefix("--")].value]
    if len(names) > 1:
        raise InputError(f"give one of {' and '.join(names)}.")
    (chosen,) = names or [WORDS]
    commandline.refuse_unread({**READ_BY_SEARCH, **(further or {})}, chosen, "a search with ")
    return chosen


def search_opener(**how: Any) -> Callable[[], Retriever]:
    """Opens the retriever that the flags name, with its index; refuses them before that.

    `how`: further `LoadSettings`.
    """
    from qrag_jax.retrieval.index_folder import IndexAt
    from qrag_jax.systems import retriever as loading

    values, plain = flags.FLAGS, None
    if not values.index:
        raise InputError("give the folder of an index, for example --index=indexes/wiki.")
    at = IndexAt(Path(values.index).expanduser(), values.engine, values.server)
    folder = values.workdir or values.retriever or ""
    if folder and not Path(folder).expanduser().is_dir():
        raise InputError(f"{folder} is no folder; give --workdir=RUN or --retriever=EXPORT.")
    dtype = "" if values.compute == "auto" else values.compute
    how |= {"checkpoint": values.checkpoint, "bm25_weight": values.bm25_weight}
    settings = loading.LoadSettings(dtype=dtype, **how)
    if values.encoder:
        prefixes, most = (values.question_prefix, values.chunk_prefix), values.max_chunk_tokens
        computed = {"dtype": values.compute, "pooling": values.pooling}
        plain = loading.PlainEncoder.of(values.encoder, *prefixes, most, **computed)

    def opened() -> Retriever:
        retriever: Retriever = loading.SingleStepRetriever(plain)
        if folder:
            retriever = loading.Retriever.load(folder, settings)
        retriever.open(at.folder, at.engine, at.url)
        return retriever

    return opened
