"""The commands keyed by name, and the answers to --help, --version and a mistyped command."""

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

DESCRIPTION = "Casts sharded FP32 master weights to FP8 or 4-bit weights after each optimizer step."
HELP, VERSION = ("-h", "--help"), "--version"


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        function: the function that runs the command, by its path in zerocast.
        options: the class of its options, by its path in zerocast.
        arguments: the positional arguments, as help shows them.
        summary: a line of help.
    """

    function: str
    options: str
    arguments: str
    summary: str


COMMANDS = {
    "doctor": Command(
        "cli.doctor.doctor",
        "cli.options.DoctorConfig",
        "",
        "show versions and backends, and test every backend's bytes",
    ),
    "plan": Command(
        "cli.plan.plan", "cli.options.PlanConfig", "MODEL", "the bytes that a rank holds and sends in a step"
    ),
    "inspect": Command(
        "cli.inspect.inspect",
        "cli.options.InspectConfig",
        "CHECKPOINT",
        "the contents of a checkpoint, and the effect of a format",
    ),
    "export": Command(
        "cli.export.export",
        "cli.options.ExportConfig",
        "SOURCE TARGET",
        "masters to a folder for engines, safetensors, or a checkpoint",
    ),
    "bench": Command("cli.bench.cast", "bench.config.BenchConfig", "", "time casts next to a memory copy"),
    "bench step": Command(
        "cli.bench.step", "bench.config.StepConfig", "", "time training steps next to bf16 and other libraries"
    ),
}


@dataclass(frozen=True)
class Call:
    """A command line that was split into the name of a command and its arguments.

    Attributes:
        name: the name of the command, known or not.
        words: the arguments after it, or all of them if the command is unknown.
        command: the command; None if it is unknown.
    """

    name: str
    words: Sequence[str]
    command: Command | None

    def parsed(self) -> Callable[[], int]:
        """Parse the options. Returns the command as a function without arguments, which returns the
        exit status.

        Help, and arguments that cannot be parsed, end the process with status 0 or 2, before the
        command itself is imported.
        """
        if self.command is None:
            sys.exit(_without_a_command(self.name, self.words))
        # The import takes half a second, which help of all commands and the version need not wait
        # for.
        import tyro  # noqa: PLC0415

        options_class: Any = _imported(self.command.options)
        program = f"zerocast {self.name}"
        options: Any = tyro.cli(
            _with_flowing_help(options_class, program),
            prog=program,
            description=inspect.getdoc(options_class),
            args=self.words,
        )
        return functools.partial(_imported(self.command.function), options)


def _imported(path: str) -> Any:
    """Return the object at a path in zerocast."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"zerocast.{module}"), name)


def find(arguments: Sequence[str] | None = None) -> Call:
    """Find the command that the arguments name, by default the arguments of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = _name(words)
    if name not in COMMANDS:
        return Call(name, words, None)
    return Call(name, words[len(name.split()) :], COMMANDS[name])


def _name(words: Sequence[str]) -> str:
    """Return the name of the command in the arguments, known or not. It has two words if a command
    begins with the first word and has a second one, such as `bench step`.
    """
    if not words or words[0].startswith("-"):
        return ""
    has_second_word = len(words) > 1 and not words[1].startswith("-")
    if has_second_word and any(name.startswith(f"{words[0]} ") for name in COMMANDS):
        return f"{words[0]} {words[1]}"
    return words[0]


def _with_flowing_help(options: type, program: str) -> type:
    """Return a class of the same options whose help texts are one line each, since tyro keeps the
    line breaks of docstrings. Its name is the program's, with which tyro begins errors.
    """
    # This package comes with tyro.
    import docstring_parser  # noqa: PLC0415

    fields = docstring_parser.parse_from_object(options).params
    flowing = [f":param {field.arg_name}: {' '.join((field.description or '').split())}" for field in fields]
    return type(program, (options,), {"__doc__": "\n".join(flowing)})


def _without_a_command(name: str, words: Sequence[str]) -> int:
    if words[:1] == [VERSION]:
        print(f"zerocast {sys.modules['zerocast'].__version__}")
        return 0
    if words and words[0] in HELP:
        print(_help())
        return 0
    if not words:
        sys.stderr.write(f"{_help()}\n")
    else:
        close_matches = difflib.get_close_matches(name or words[0], [*COMMANDS, HELP[1], VERSION], n=1)
        guess = f"did you mean {close_matches[0]!r}?" if close_matches else f"there are {', '.join(COMMANDS)}"
        sys.stderr.write(f"zerocast: no command {name or words[0]!r}: {guess} (zerocast --help shows all)\n")
    return 2


def _help() -> str:
    calls = {f"{name} {command.arguments}".strip(): command.summary for name, command in COMMANDS.items()}
    width = max(map(len, calls))
    return "\n".join(
        [
            "usage: zerocast COMMAND [OPTIONS]",
            "",
            DESCRIPTION,
            "",
            *(f"  {call:<{width}}  {summary}" for call, summary in calls.items()),
            "",
            "zerocast COMMAND --help shows options and an example, zerocast --version the version.",
        ]
    )
