"""The commands by name, and what answers help, the version and a mistyped command."""

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

DESCRIPTION = "FP32 master shards to FP8 and NVFP4 weights after each optimizer step."
HELP, VERSION = ("-h", "--help"), "--version"


@dataclass(frozen=True)
class Command:
    """A command: the function that runs it, its arguments in a word, and a line of help."""

    module: str
    function: str
    arguments: str
    summary: str


COMMANDS = {
    "doctor": Command("doctor", "doctor", "", "what is installed and chosen here, and are its bytes right?"),
    "plan": Command("plan", "plan", "MODEL", "the bytes that a rank holds and sends in a step"),
    "inspect": Command("inspect", "inspect", "CHECKPOINT", "what a checkpoint holds, and what a format does to its weights"),
    "export": Command("export", "export", "SOURCE TARGET", "masters to what engines load, to safetensors, or to a checkpoint"),
    "bench": Command("bench", "cast", "", "time casts beside a copy of memory"),
    "bench step": Command("bench", "step", "", "time training steps beside bf16 and other libraries"),
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """The request of a command line; `function` is None if that is no command."""

    name: str
    words: Sequence[str]
    function: Callable[[Any], int] | None

    def parsed(self) -> Callable[[], int]:
        """The command with its options, ready to run; it returns the exit status.

        Help, and arguments that cannot be parsed, end the process with status 0 or 2.
        """
        if self.function is None:
            sys.exit(_without_a_command(self.name, self.words))
        import tyro  # noqa: PLC0415 - takes half a second

        (config,) = inspect.signature(self.function).parameters.values()
        program, description = f"zerocast {self.name}", inspect.getdoc(self.function)
        options: Any = tyro.cli(
            _shown(config.annotation, program), prog=program, description=description, args=self.words
        )
        return functools.partial(self.function, options)


def find(arguments: Sequence[str] | None = None) -> Call:
    """Import the command that the arguments name, by default those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = _name(words)
    if name not in COMMANDS:
        return Call(name, words, None)
    module = importlib.import_module(f"zerocast.cli.{COMMANDS[name].module}")
    return Call(name, words[len(name.split()) :], getattr(module, COMMANDS[name].function))


def _name(words: Sequence[str]) -> str:
    """The command's words, known or not; `bench step` and what is meant for it have two."""
    named = [word for word in words[:2] if not word.startswith("-")] if words and not words[0].startswith("-") else []
    has_parts = named and any(name.startswith(f"{named[0]} ") for name in COMMANDS)
    return " ".join(named if has_parts else named[:1])


def _shown(options: type, program: str) -> type:
    """The options as a class with the name that errors begin with, and with help that flows: of
    docstrings tyro keeps the line breaks before an indent.
    """
    import docstring_parser  # noqa: PLC0415 - comes with tyro

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
        meant = difflib.get_close_matches(name or words[0], [*COMMANDS, HELP[1], VERSION], n=1)
        guess = f"did you mean {meant[0]!r}?" if meant else f"there are {', '.join(COMMANDS)}"
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
