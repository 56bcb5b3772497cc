"""The commands that show a whole view: a page to explore, and a file to keep.

(This module has no ``from __future__ import annotations``, because typer reads the annotations as objects.)
"""

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmf.cli.options import Delta, DirectionName, Epsilon, MaxOrder, Names, listed, mechanism_from, takes

if TYPE_CHECKING:
    from dpmf.mechanism import Mechanism


def explore(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 8501,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
    workers: Annotated[int, typer.Option(help="Number of processes that compute, shared by all tabs.")] = 2,
    time_limit: Annotated[float, typer.Option(help="Seconds after which a view is shown as far as it got.")] = 180.0,
) -> None:
    """Serve a page on this machine: designs ranked by error, and accountants for experts (needs the extra [web])."""
    from dpmf.web.serve import serve

    serve(port, browser, workers, time_limit)


@functools.wraps(mechanism_from)
def _described(**options: Any) -> "tuple[Mechanism, dict[str, Any]]":
    """Return the mechanism and the options that describe it, with the number of batches that sizes stand for."""
    mechanism = mechanism_from(**options)
    described = {name: value for name, value in options.items() if name not in ("dataset_size", "batch_size")}
    return mechanism, described | {"batches_per_epoch": mechanism.batching.batches_per_epoch}


@takes(_described)
def report(
    described: "tuple[Mechanism, dict[str, Any]]",
    *,
    epsilon: Epsilon,
    delta: Delta,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .html file to write.")],
    names: Names = None,
    max_order: MaxOrder = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise multiplier of the curves. [default: the smallest found]")
    ] = None,
    direction: DirectionName = "both",
    tradeoff: Annotated[
        bool, typer.Option("--tradeoff/--no-tradeoff", help="Also report what any attack can achieve.")
    ] = True,
) -> None:
    """Write what `explore` shows experts of one mechanism as one self-contained HTML file."""
    from rich.console import Console
    from rich.progress import Progress

    from dpmf.files import write_atomically
    from dpmf.report import checked_output
    from dpmf.web.document import html
    from dpmf.web.pictures import drawn
    from dpmf.web.request import Request
    from dpmf.web.view import views

    mechanism, words = described
    checked_output(output, (".html",))
    request = Request(
        **{**words, "file": None if words["file"] is None else str(words["file"])},
        epsilon=epsilon,
        delta=delta,
        direction=direction,
        max_order=max_order,
        noise_multiplier=noise_multiplier,
    )
    view = None
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("")
        for view in views(mechanism, request, listed(names), with_attacks=tradeoff):
            progress.update(task, completed=view.done, total=view.steps, description=view.doing)
    assert view is not None
    write_atomically(output, html(view, request, drawn(view)).encode())
    print(f"wrote {output}")
