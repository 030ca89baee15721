"""`zerocast plan`: the bytes of a model in memory and in communication, without a machine to run
it.

Nothing here imports torch, except to build a model from its config.
"""

from zerocast.cli import interrupts
from zerocast.cli.options import PlanConfig
from zerocast.cli.output import check_folder
from zerocast.cli.plan_report import report
from zerocast.footprint.model_files import read_model
from zerocast.formats import get_format


def plan(config: PlanConfig) -> int:
    """Run `zerocast plan`; returns the exit status."""
    try:
        check_folder(config.png)
        if config.format != "bf16":
            get_format(config.format)
        model = read_model(config.model)
        text = report(config, model)
    except (ImportError, OSError, TypeError, ValueError) as error:
        interrupts.print_error(f"zerocast plan: {error}")
        return 2
    print(text)
    return 0
