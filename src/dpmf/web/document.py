"""A view as one HTML file: no script, no request, pictures inside."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from dpmf._version import __version__
from dpmf.web.recipe import Recipe
from dpmf.web.view import Row, View

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .3rem .9rem; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.best td { font-weight: 600; } pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; } .pictures figure { margin: 0; flex: 1 1 24rem; }
.pictures svg { width: 100%; height: auto; } footer { margin-top: 2rem; color: #666; font-size: .85rem; }
"""

# Nothing may be fetched or run, whatever ends up in the text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def outcome(row: Row, complete: bool) -> str:
    """What the last column says of a row."""
    if row.problem:
        return row.problem
    if row.noise_multiplier is None:
        return "not finished" if complete else ""
    return row.note or (f"{row.binding} decides" if row.binding else "")


_CAPTIONS = {
    "curves": "δ(ε): no point in the grey area can be guaranteed",
    "gram": "The Gram matrix: all that accounting needs to know of the strategy",
}


def html(view: View, recipe: Recipe, pictures: Mapping[str, str]) -> str:
    """The whole file; `pictures` are those of `pictures.drawn`."""
    target = f"({view.epsilon:g}, {view.delta:g})-DP"
    relation = "a record added or removed" if view.direction == "both" else f"the {view.direction} direction only"
    best = view.best
    used = [row.accountant for row in view.rows if row.noise_multiplier is not None]
    if best is None:
        answer = f"No accountant found a noise multiplier for {target}."
    else:
        sigma, by = number(best.noise_multiplier), escape(best.accountant)
        answer = f"Noise multiplier <b>{sigma}</b> gives {target}, guaranteed by {by}."
    if view.lower:
        answer += f" No accountant can go below {number(view.lower)}."
    rows = "\n".join(
        f"<tr{' class=best' if row is best else ''}><td>{escape(row.accountant)}</td>"
        f'<td class="number">{number(row.noise_multiplier)}</td><td>{escape(outcome(row, True))}</td></tr>'
        for row in view.rows
    )
    lower = f'<tr><td>certainly not below</td><td class="number">{number(view.lower)}</td><td>certified</td></tr>'
    figures = "\n".join(
        f"<figure>{svg}<figcaption>{_CAPTIONS[name]}</figcaption></figure>" for name, svg in pictures.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(view.mechanism)}: {escape(target)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(view.mechanism)}</h1>
<p>{answer} Neighbouring: {relation}. Noise multipliers are for clipping norm 1 and the strategy as given; batches are
balls-in-bins.</p>
<table>
<tr><th>accountant</th><th>noise multiplier σ</th><th></th></tr>
{rows}
{lower}
</table>
<div class="pictures">
{figures}
</div>
<h2>The same in Python</h2>
<pre>{escape(recipe.python(used, view.curve_noise))}</pre>
<h2>The same from the shell</h2>
<pre>{escape(recipe.shell(used))}</pre>
<footer>dpmf {__version__}</footer>
</body>
</html>
"""
