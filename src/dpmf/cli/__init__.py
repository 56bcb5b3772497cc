"""The command line. It uses the words of the Python API, and prints tables for people and JSON for programs.

Only typer is imported at the start, so that ``dpmf --help`` answers at once; each command imports what it needs. To add
a command, write it in a module of this package and list it below.
"""

import os
import sys
from typing import Annotated

import typer

from dpmf._version import __version__
from dpmf.cli import commands, compare, design, pages, tradeoff, verify
from dpmf.cli.options import fail, in_options

app = typer.Typer(
    name="dpmf",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Guaranteed noise multipliers for differentially private training with correlated noise, under "
    "balls-in-bins batching. Noise multipliers are for clipping norm 1 and the strategy as given.",
)

for _command in (
    design.design,
    commands.calibrate,
    commands.epsilon,
    commands.delta,
    commands.profile,
    tradeoff.tradeoff,
    compare.compare,
    verify.verify,
    commands.accountants,
    commands.strategies,
    pages.explore,
    pages.report,
):
    app.command()(_command)


def _version(value: bool) -> None:
    if value:
        print(f"dpmf {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Every foreseeable failure is one line on stderr and exit status 2."""
    try:
        status = app(standalone_mode=False)
    except (ValueError, ImportError, MemoryError) as error:
        fail(in_options(error) or type(error).__name__)
    except BrokenPipeError:
        # The reader of the pipe has closed it; keep the interpreter from complaining while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except Exception as error:
        # These are usage errors of typer. Its exception classes moved between versions; their attributes did not.
        if hasattr(error, "format_message"):
            fail(error.format_message())
        if type(error).__name__ == "Abort":
            fail("interrupted", 130)
        raise
    sys.exit(status if isinstance(status, int) else 0)
