"""The application: registers the commands by name."""

from collections.abc import Sequence

from tyro.extras import SubcommandApp

from zerocast.cli.bench import bench
from zerocast.cli.convert import convert
from zerocast.cli.doctor import doctor
from zerocast.cli.inspect import inspect
from zerocast.cli.plan import plan

DESCRIPTION = "FP32 master shards to FP8 and NVFP4 weights after each optimizer step."

commands = SubcommandApp()
commands.command(bench, name="bench", help="Time casts, or with `step` whole training steps.")
commands.command(convert)
commands.command(doctor)
commands.command(inspect)
commands.command(plan)


def app(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the command; returns the exit status.

    Arguments that cannot be parsed end the process with status 2 and the reason.
    """
    status: int = commands.cli(prog="zerocast", description=DESCRIPTION, args=arguments)
    return status
