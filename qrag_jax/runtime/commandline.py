"""Command lines: bad input is one sentence, with exit status 2; output may be closed."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from absl import app, flags, logging

from qrag_jax.errors import InputError
from qrag_jax.runtime import buckets, own_code

BAD_INPUT = 2
HELP = {"--help", "-h", "-help", "--helpfull", "--helpshort"}
# EPIPE: the reader of a pipe is gone (`| head`). EIO: the terminal is gone.
_GONE = (errno.EPIPE, errno.EIO)
_SETTLES = 0.05  # seconds in which a write that has begun ends


def run(
    main: Callable[[], int],
    define: Callable[[Sequence[str]], None] | None = None,
    more_help: Callable[[Sequence[str]], str] | None = None,
    words: list[str] | None = None,
) -> None:
    """Parses the flags, runs `main` and exits with its status.

    Every `InputError` prints one sentence, without a traceback, and exits with 2. So does a program
    that does not fit into the devices' memory, with 1. A command goes on when its output is closed
    (`| head`).

    Args:
        main: the command; returns the exit status.
        define: called first, with the arguments, to define flags that depend on them.
        more_help: called with the arguments; returns the text that `--help` adds to the flags.
        words: gets the arguments that are no flags; None: these are refused.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            if define is not None:
                define(argv[1:])
            if HELP & set(argv[1:]):
                print("\n\n".join([_help(), *([more_help(argv[1:])] if more_help else [])]))
                raise SystemExit(0)
            rest = flags.FLAGS(list(argv))
            _check_numbers()
        except InputError as error:
            _leave(str(error))
        except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
            _leave(sentence(error, argv))
        if words is not None:
            words.extend(rest[1:])
        elif len(rest) > 1:
            _leave(f"unexpected argument {rest[1]!r}; options are written --name=value.")
        return rest

    with lasting_output():
        try:
            with buckets.staged(own_code.resolved(sys.argv)) as argv:
                app.run(lambda _: _main_or_sentence(main), argv=argv, flags_parser=parse)
        except InputError as error:  # of the bucket
            _leave(str(error))


def _check_numbers() -> None:
    """Refuses flags that no program can use."""
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        for number in value if isinstance(value, list | tuple) else (value,):
            least = 0 if name.endswith("seed") else -(2**63)
            if isinstance(number, float) and not number < math.inf:  # -inf: no threshold
                raise InputError(f"--{name} is {value}; give a finite number.")
            if isinstance(number, int) and not least <= number < 2**63:
                raise InputError(f"--{name} is {value}; give a number from {least} to 2⁶³ - 1.")


def _help() -> str:
    about = sys.modules["__main__"].__doc__ or ""
    flag_help = [
        flags.FLAGS.module_help(module).strip().partition("\n")[2]  # line 1 is the module's name
        for module in flags.FLAGS.flags_by_module_dict()
        if module == sys.argv[0] or module.startswith("qrag_jax.")
    ]
    return "\n".join([about.strip(), "", "Flags:", *flag_help])


def _main_or_sentence(main: Callable[[], int]) -> int:
    if not flags.FLAGS["verbosity"].present:
        # Orbax logs every rename at INFO, and the traceback of every error it raises at ERROR.
        logging.set_verbosity(logging.FATAL)
    # All here is written for 32 bits, whatever else may need.
    os.environ["JAX_ENABLE_X64"] = "false"
    if "jax" in sys.modules:  # it has read the environment already
        sys.modules["jax"].config.update("jax_enable_x64", False)
    try:
        return main()
    except InputError as error:
        _leave(str(error))
    except Exception as error:
        if wrong := _wrong_environment(error):
            _leave(wrong)
        from qrag_jax.runtime import aot  # imports jax, which some commands do not need

        if (shortage := aot.shortage(error)) is None:
            raise
        print(f"error: {shortage}", file=sys.stderr)
        return 1


def _wrong_environment(error: Exception) -> str:
    """What this process's environment lacks, in one sentence; "": the error has other reasons."""
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of pathlib
        return "this user has no home folder; set HOME, or QRAG_CACHE and paths without ~."
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms and "jax" in sys.modules and isinstance(error, AssertionError | RuntimeError):
        try:
            sys.modules["jax"].devices()
        except Exception:
            fix = "unset it, or pip install 'qrag_jax[cuda13]' (or cuda12, tpu)"
            return f"JAX_PLATFORMS is {platforms}, which jax cannot use here; {fix}."
    return ""


def sentence(error: Exception, argv: Sequence[str]) -> str:
    """What is wrong with the flags, of the error that reading them raised."""
    if isinstance(error, flags.UnrecognizedFlagError):
        return f"{str(error).rstrip(' ?.')}; see --help."
    # ml_collections names only the part of --config.a.b that it did not find, in quotes.
    quoted = re.search(r"'(\w+)\\?'", str(error))
    if isinstance(error, (AttributeError, KeyError)) and quoted:
        like = re.search(r"Did you mean \\?['\"](\w+)", str(error))
        instead = f"did you mean {like[1]}?" if like else "see --help."
        flags_given = (word.lstrip("-").partition("=")[0] for word in argv if word[:1] == "-")
        flag = next((flag for flag in flags_given if quoted[1] in flag.split(".")), None)
        if flag is not None:
            return f"--{flag}: the config has no field {quoted[1]!r}; {instead}"
    # If a config file fails, the message holds its traceback; the reason is the last line.
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    if not lines:
        return type(error).__name__
    # absl's message begins with "flag --config=FILE: "; that is dropped before a field's name.
    last = re.sub(r"^flag --config=\S+: (?=config\.)", "", lines[-1])
    return last.removeprefix("ValueError: ")


def refuse_unread(read_by: Mapping[str, Sequence[str]], asked: str, what: str = "") -> None:
    """Refuses flags of the command line that only others than what is asked for read.

    `read_by`: flag → its readers; `what`: stands before these in the message.
    """
    for name, readers in read_by.items():
        if flags.FLAGS[name].present and asked not in readers:
            raise InputError(f"--{name} is for {what}{' or '.join(readers)}; leave it out.")


def _leave(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(BAD_INPUT)


# ---------------------------------------------------------------------- output


class _LastingFile(io.FileIO):
    """A file whose reader may go away; what is written after that is dropped.

    The file descriptor itself is redirected to the null device, so later writes by Python or by a
    library do not fail. Other errors, such as a full disk, are raised as usual.
    """

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            _silence(self.fileno())
            return super().write(data)


def end_process(line: str, status: int) -> NoReturn:
    """Ends the process at once; `line`, after a blank line, is the last one on standard error.

    No thread is waited for. What threads write later, in Python or in a library of another
    language, goes to the null device.
    """
    with contextlib.suppress(OSError):  # nobody may read it
        ours = os.dup(sys.stderr.fileno())
        _silence(sys.stderr.fileno())
        time.sleep(_SETTLES)
        # A thread may be in the middle of a line.
        os.write(ours, f"\n{line}\n".encode(errors="backslashreplace"))
    os._exit(status)


def _silence(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _lasting(stream: Any) -> TextIO:
    """A stream to the same file, or to none if it was closed at the start."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    try:
        file = _LastingFile(stream.fileno(), "w", closefd=False)
    except OSError:  # no file of the system, such as in a notebook
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=stream.encoding,
        errors="backslashreplace",  # for characters that the terminal's encoding has not
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Lets `sys.stdout` and `sys.stderr` outlive their readers."""
    out, errors = _lasting(sys.stdout), _lasting(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            yield
        finally:
            out.flush()
            errors.flush()
