"""A view as one HTML file, with its pictures inside, without scripts and without requests to other servers."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from dpmf._version import __version__
from dpmf.formatting import given, lower, upper
from dpmf.web import recipe
from dpmf.web.request import Request
from dpmf.web.view import Row, View

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .3rem .9rem; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.best td { font-weight: 600; } pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; }
.pictures figure { margin: 0; flex: 1 1 24rem; max-width: 31rem; }
.pictures svg { width: 100%; height: auto; } footer { margin-top: 2rem; color: #666; font-size: .85rem; }
"""

# The browser must not fetch or run anything, whatever ends up in the text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def noise(value: float | None) -> str:
    """Return a noise multiplier to use, rounded up."""
    return "" if value is None else upper(value)


def outcome(row: Row, complete: bool) -> str:
    """Return the text of the last column of a row."""
    if row.problem:
        return row.problem
    if row.noise_multiplier is None:
        return "not finished" if complete else ""
    return row.note or (f"the {row.binding} direction decides" if row.binding else "")


def errors_in_words(view: View) -> str:
    """Return a sentence about the noise in the model; nothing before it is known."""
    if not view.errors:
        return ""
    each = "; ".join(
        f"{name}: {upper(error, 4)}, {relative:.3f} times that of DP-SGD with its best batching"
        for name, error, relative in view.errors
    )
    return f"Error of the noise in the model (root mean square over iterations, clipping norm 1). {each}."


_CAPTIONS = {
    "curves": "Upper bounds on δ(ε). No accountant can guarantee a point in the grey area.",
    "tradeoff": "The trade-off curve: no attack has both errors below it.",
    "gram": "The Gram matrix, which is all that the accountants need to know of the strategy.",
}


def html(view: View, request: Request, pictures: Mapping[str, str]) -> str:
    """Return the whole file.

    Args:
      view: what is shown.
      request: what was asked for; it gives the lines of Python and shell.
      pictures: the drawings that `pictures.drawn` returned for the view.
    """
    target = f"({given(view.epsilon)}, {given(view.delta)})-DP"
    relation = "a record added or removed" if view.direction == "both" else f"the {view.direction} direction only"
    best = view.best
    used = [row.accountant for row in view.rows if row.noise_multiplier is not None]
    if best is None:
        answer = f"No accountant found a noise multiplier for {target}."
    else:
        sigma, by = noise(best.noise_multiplier), escape(best.accountant)
        answer = f"Noise multiplier <b>{sigma}</b> gives {target}, guaranteed by {by}."
    below = "" if view.lower is None else lower(view.lower)
    if view.lower:
        answer += f" No accountant can certify a noise multiplier below {below}."
    rows = "\n".join(
        f"<tr{' class=best' if row is best else ''}><td>{escape(row.accountant)}</td>"
        f'<td class="number">{noise(row.noise_multiplier)}</td><td>{escape(outcome(row, True))}</td></tr>'
        for row in view.rows
    )
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
<p>{answer} Neighbouring: {relation}. Noise multipliers are for clipping norm 1 and the strategy as given.</p>
<p>{escape(errors_in_words(view))}</p>
<table>
<tr><th>accountant</th><th>noise multiplier σ</th><th></th></tr>
{rows}
<tr><td>lower bound</td><td class="number">{below}</td><td>certified</td></tr>
</table>
<div class="pictures">
{figures}
</div>
{_attacks(view)}<h2>The same in Python</h2>
<pre>{escape(recipe.python(request, used, view.curve_noise))}</pre>
<h2>The same from the shell</h2>
<pre>{escape(recipe.shell(request, used))}</pre>
<footer>dpmf {__version__}</footer>
</body>
</html>
"""


def _attacks(view: View) -> str:
    """Return the section on what any attack can achieve, if it was computed."""
    if not view.attacks or view.curve_noise is None:
        return ""
    rows = "\n".join(f'<tr><td>{escape(name)}</td><td class="number">{value}</td></tr>' for name, value in view.attacks)
    sigma = noise(view.curve_noise)
    return f"<h2>What any attack can achieve, at noise multiplier {sigma}</h2>\n<table>\n{rows}\n</table>\n"
