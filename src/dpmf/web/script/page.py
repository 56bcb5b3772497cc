"""The page itself, a script that Streamlit runs once for every change of an input (see `serve`).

It has two tabs: designs for a run of a given size, and everything that accountants say of one mechanism, for experts.

A run shows what is known and goes on until the view is finished. A change of an input ends the run and starts the next
one; the pool then ends the computation that nobody watches any more.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import streamlit as st

from dpmf.batching import NAMES
from dpmf.formatting import lower, upper
from dpmf.web import recipe
from dpmf.web.document import errors_in_words, html, noise, outcome
from dpmf.web.pool import Asked, Pool, Shown, Snapshot
from dpmf.web.ranking import DesignRequest, RankedRow, Ranking, in_words, memory_in_words, parse_design
from dpmf.web.request import BANDED, DIRECTIONS, LONGEST_TEXT, STRATEGIES, Request, number, optional, parse
from dpmf.web.serve import shared_pool
from dpmf.web.view import View

_LABELS = {
    "dpsgd": "DP-SGD: independent noise",
    "bsr": "BSR: banded square root",
    "bisr": "BISR: banded inverse square root",
    "bandmf": "BandMF: optimised, banded",
    "bandinvmf": "BandInvMF: optimised, banded inverse",
    "blt": "BLT: optimised, buffered",
    "coefficients": "Coefficients, typed in",
}
_BATCHINGS = {
    "fixed": "Fixed bins",
    "reshuffled": "Bins thrown anew every epoch",
    "cyclic": "Cyclic allocation, thrown anew",
    "poisson": "Poisson sampling",
    "cyclic-poisson": "Cyclic Poisson sampling",
}
_TABS = {"design": "Designs for my run", "experts": "For experts: one mechanism"}
_MOST_PARAMETERS = 10**13
_MOST_ROWS = 8  # of each table of designs
_LONGEST_ADDRESS = 2000
# On a phone, the last of the six columns of designs goes below the others, so that the table fits the screen.
_STYLE = """<style>@media (max-width: 640px) {
  tr:has(> :nth-child(6)) { display: grid; grid-template-columns: 1.6fr .9fr 1.1fr 1.25fr 1.15fr; }
  tr:has(> :nth-child(6)) > * { padding: .3rem !important; font-size: .8rem; overflow-wrap: anywhere; }
  tr:has(> :nth-child(6)) > :last-child { grid-column: 1 / -1; }
  table:has(> tbody > tr > :nth-child(6)) { width: 100%; }
}</style>"""
_STEP, _LONGEST_STEP = 0.1, 1.0  # seconds between two queries of the pool, at first and after a while


def _from_address(name: str, default: str) -> str:
    """Return the value of a field in the address of the page, so that a view can be linked to."""
    return str(st.query_params.get(name, default))


def _chosen(name: str, label: str, options: tuple[str, ...], default: str, **more: Any) -> str:
    asked = _from_address(name, default)
    index = options.index(asked if asked in options else default)
    return str(st.selectbox(label, options, index=index, key=name, **more))


class _Inputs:
    """What was typed, and the place beside each field for a message about it."""

    def __init__(self) -> None:
        self.typed: dict[str, str] = {}
        self.beside: dict[str, Any] = {}

    def text(self, name: str, label: str, value: str, help_text: str, area: bool = False) -> None:
        make, longest = (st.text_area, LONGEST_TEXT) if area else (st.text_input, 40)
        value = _from_address(name, value)[:longest]
        self.typed[name] = str(make(label, value, key=name, help=help_text, max_chars=longest))
        self.beside[name] = st.empty()

    def choice(self, name: str, label: str, options: tuple[str, ...], default: str, **more: Any) -> str:
        self.typed[name] = _chosen(name, label, options, default, **more)
        self.beside[name] = st.empty()
        return self.typed[name]


def _design_fields() -> _Inputs:
    inputs = _Inputs()
    with st.sidebar:
        inputs.text("dataset_size", "Records in the dataset", "50000", "each of which is protected")
        inputs.text("batch_size", "Batch size", "500", "records in a batch, on average")
        inputs.text("epochs", "Epochs", "10", "the number of passes over the dataset")
        inputs.text("epsilon", "Privacy budget ε", "8", "of the guarantee")
        with st.expander("More"):
            inputs.text("delta", "Privacy budget δ", "1e-5", "of the guarantee")
            inputs.text(
                "memory", "Steps that the model remembers", "100",
                "after about so many steps the model has forgotten one; leave empty for a model that never forgets",
            )  # fmt: skip
            inputs.text("copies", "Copies of the model that noise may keep", "", "leave empty for any number")
            inputs.text("parameters", "Parameters of the model", "", "to show memory in bytes (single precision)")
    return inputs


def _fields() -> _Inputs:
    inputs = _Inputs()
    with st.sidebar:
        strategy = inputs.choice("strategy", "Strategy", STRATEGIES, "bsr", format_func=lambda name: _LABELS[name])
        if strategy in BANDED:
            inputs.text("bandwidth", "Bandwidth p", "4", "of C (BSR, BandMF) or of its inverse (BISR, BandInvMF)")
        if strategy == "blt":
            inputs.text("buffers", "Buffers", "", "leave empty to let the optimiser choose")
        if strategy == "coefficients":
            inputs.text(
                "coefficients", "First column of C", "1, 0.5, 0.375", "separated by commas or blanks", area=True
            )
        inputs.text("epochs", "Epochs k", "1", "the number of passes over the bins")
        inputs.text("batches_per_epoch", "Batches per epoch b", "100", "the number of bins")
        batching = inputs.choice("batching", "Batching", NAMES, "fixed", format_func=lambda name: _BATCHINGS[name])
        if batching in ("reshuffled", "cyclic"):
            inputs.text("rethrow_every", "Epochs between throws", "", "leave empty to throw anew in every epoch")
        if batching in ("reshuffled", "cyclic", "cyclic-poisson"):
            between = "distance between the iterations of one record; leave empty for the usual one"
            inputs.text("stride", "Stride", "", between)
        inputs.text("epsilon", "Target ε", "2", "of the guarantee")
        inputs.text("delta", "Target δ", "1e-5", "of the guarantee")
        with st.expander("More"):
            inputs.choice("direction", "Neighbouring relation", DIRECTIONS, "both")
            inputs.text("max_order", "Largest Rényi order", "", "leave empty for as many as the work budget allows")
            inputs.text(
                "noise_multiplier", "Noise multiplier of the curves", "", "leave empty for the smallest one found"
            )
    return inputs


def _markdown_safe(text: str) -> str:
    """Escape a text so that Markdown shows it as it is."""
    return "".join("\\" + c if c in "\\`*_{}[]()#+-.!|<>~$:" else c for c in text)


def _picture(svg: str, words: str) -> None:
    data = base64.b64encode(svg.encode()).decode()
    st.html(f'<img alt="{words}" style="width:100%" src="data:image/svg+xml;base64,{data}">')


def _table(view: View, finished: bool) -> None:
    best = view.best
    lines = ["| accountant | noise multiplier σ | |", "|---|---:|---|"]
    for row in view.rows:
        bold = "**" if row is best else ""
        words = _markdown_safe(outcome(row, finished))
        lines.append(f"| {bold}{row.accountant}{bold} | {bold}{noise(row.noise_multiplier)}{bold} | {words} |")
    if view.lower is not None:
        lines.append(f"| *lower bound* | {lower(view.lower)} | certified: no accountant can do better |")
    st.markdown("\n".join(lines))


def _show(view: View, pictures: Mapping[str, str], request: Request, finished: bool) -> None:
    if finished and view.complete and view.best is None:
        st.warning("No accountant found a noise multiplier for this mechanism and target.")
    best = view.best
    left, right = st.columns(2)
    sigma = noise(best.noise_multiplier) if best else "…"
    below = "…" if view.lower is None else lower(view.lower)
    left.metric("Noise multiplier σ, guaranteed", sigma, help="for clipping norm 1 and the strategy as given")
    right.metric("Lower bound", below, help="no accountant can certify a smaller noise multiplier")
    _table(view, finished)
    if view.errors:
        st.markdown(_markdown_safe(errors_in_words(view)))
    left, right = st.columns(2)
    if "curves" in pictures:
        with left:
            _picture(pictures["curves"], "delta against epsilon, with the certified lower bound shaded")
    if "gram" in pictures:
        with right:
            _picture(pictures["gram"], "Gram matrix as a heat map")
    if view.attacks:
        st.markdown("**What any attack can achieve**, at the noise multiplier of the curves")
        left, right = st.columns(2)
        lines = [
            "| | at most |",
            "|---|---:|",
            *(f"| {_markdown_safe(name)} | {value} |" for name, value in view.attacks),
        ]
        left.markdown("\n".join(lines))
        if "tradeoff" in pictures:
            with right:
                _picture(pictures["tradeoff"], "type II error of the best attack against its type I error")
    used = [row.accountant for row in view.rows if row.noise_multiplier is not None]
    if finished and used:
        st.markdown("The same in Python")
        st.code(recipe.python(request, used, view.curve_noise), language="python", wrap_lines=True)
        st.markdown("The same from the shell")
        st.code(recipe.shell(request, used), language="bash", wrap_lines=True)
        st.download_button("This view as one HTML file", html(view, request, pictures), "dpmf-report.html", "text/html")


def _ranked(rows: list[RankedRow], parameters: int | None) -> str:
    """A table of designs: the best first, DP-SGD marked as the baseline."""
    sign = "" if all(row.certified for row in rows) else "≈\N{NO-BREAK SPACE}"
    lines = [
        "| | error | against DP-SGD | noise multiplier σ | memory | what training does |",
        "|---|---:|---:|---:|---|---|",
    ]
    for row in rows:
        name = _markdown_safe(row.strategy) + (" *(baseline)*" if row.baseline else "")
        lines.append(
            f"| {name} | {sign}{upper(row.error, 4)} | {sign}{row.relative:.3f} "
            f"| {sign}{upper(row.noise_multiplier, 5)} | {memory_in_words(row.copies, parameters)} "
            f"| {_markdown_safe(row.needs)} |"
        )
    return "\n".join(lines)


def _show_ranking(ranking: Ranking, request: DesignRequest, parameters: int | None, finished: bool) -> None:
    if not ranking.rows:
        if finished:
            st.warning("No mechanism got a guaranteed noise multiplier for this target in the time there was.")
        return
    proved = [row for row in ranking.rows if row.certified]
    best = proved[0]
    columns = st.columns(4)
    columns[0].metric("Error of the best design", upper(best.error, 4), help="noise in the model, at clipping norm 1")
    columns[1].metric("against DP-SGD", f"{best.relative:.3f}", help="DP-SGD with its best batching is 1")
    columns[2].metric("Noise multiplier σ", upper(best.noise_multiplier, 5), help="guaranteed, for clipping norm 1")
    columns[3].metric("Memory of the noise", memory_in_words(best.copies, parameters), help="beside the model itself")
    st.markdown("**Proved**, least error first")
    shown = proved[:_MOST_ROWS] + [row for row in proved[_MOST_ROWS:] if row.baseline]
    st.markdown(_ranked(shown, parameters))
    open_ones = [row for row in ranking.rows if not row.certified and row.error < best.error]
    if open_ones:
        st.markdown("**Promising, not proved yet**: sampled estimates that guarantee nothing")
        st.markdown(_ranked(open_ones[:_MOST_ROWS], parameters))
    if finished and not ranking.finished:
        st.caption("The search ended before every design was tried and proved. The command below goes on from here.")
    st.markdown("Train with the best design" + ("" if finished else ", as far as it is known"))
    st.code(ranking.code, language="python", wrap_lines=True)
    st.markdown("The same search from the shell")
    st.code(request.shell(), language="bash", wrap_lines=True)


def _status(place: Any, snapshot: Snapshot) -> None:
    view = snapshot.view
    if snapshot.state == "waiting":
        ahead = f"{snapshot.ahead} before you" if snapshot.ahead else "starting"
        place.progress(0.0, f"waiting: {ahead}")
    elif view is None:
        place.progress(0.0, f"starting ({snapshot.seconds:.0f} s)")
    else:
        refining = "first answer below; refining: " if isinstance(view, Ranking) and view.rows else ""
        words = f"{refining}{view.doing} ({snapshot.seconds:.0f} s; change an input to cancel)"
        place.progress(view.done / view.steps, words)


def _follow(pool: Pool, client: str, request: Asked, show: Callable[[Any, Snapshot], None]) -> None:
    """Show the view as it grows. Every round writes to the page, and there Streamlit can end this run."""
    status, body = st.empty(), st.empty()
    shown: tuple[Shown, Mapping[str, str]] | None = None
    step = _STEP
    while True:
        snapshot = pool.watch(client, request)
        found = None if snapshot.view is None else (_lasting(snapshot.view), snapshot.pictures)
        if snapshot.view is not None and (found != shown or snapshot.finished):
            shown = found
            with body.container():
                show(snapshot.view, snapshot)
        if snapshot.finished:
            break
        _status(status, snapshot)
        time.sleep(step)
        step = min(1.1 * step, _LONGEST_STEP)
    if snapshot.state == "done":
        status.success(f"finished in {snapshot.seconds:.1f} s")
    else:
        status.warning(snapshot.message)


def _lasting(view: Shown) -> Shown:
    """The view without the words about what is being done, which only the progress bar shows."""
    return replace(view, doing="", done=0) if isinstance(view, Ranking) else view


def _designs(client: str) -> None:
    inputs = _design_fields()
    request, problems = parse_design(inputs.typed)
    parameters: int | None = None
    try:
        parameters = optional(number(1, _MOST_PARAMETERS, whole=True))("parameters", inputs.typed["parameters"].strip())
    except ValueError as error:
        request, problems = None, problems | {"parameters": str(error)}
    if _checked(inputs, request, problems, client) and request is not None:
        st.markdown(_markdown_safe(in_words(request)))
        _follow(
            shared_pool(), client, request,
            lambda view, snapshot: _show_ranking(view, request, parameters, snapshot.finished),
        )  # fmt: skip


def _experts(client: str) -> None:
    inputs = _fields()
    request, problems = parse(inputs.typed)
    if _checked(inputs, request, problems, client) and request is not None:
        st.subheader(request.mechanism().name)
        _follow(
            shared_pool(), client, request,
            lambda view, snapshot: _show(view, snapshot.pictures, request, snapshot.finished),
        )  # fmt: skip


def _checked(inputs: _Inputs, request: Asked | None, problems: Mapping[str, str], client: str) -> bool:
    """Show what is wrong beside the fields, or put what was typed into the address. Return whether nothing is wrong."""
    for name, words in problems.items():
        inputs.beside[name].error(_markdown_safe(words))
    if request is None:
        shared_pool().leave(client)
        st.info("Nothing is computed until the fields with a message beside them are corrected.")
        return False
    if sum(map(len, inputs.typed.values())) < _LONGEST_ADDRESS:
        tab = {} if isinstance(request, DesignRequest) else {"tab": "experts"}
        st.query_params.from_dict(tab | {name: text for name, text in inputs.typed.items() if text})
    return True


def main() -> None:
    """Show the page once."""
    st.set_page_config(page_title="dpmf explore", layout="wide")
    st.html(_STYLE)
    st.title("dpmf explore")
    st.caption("Differentially private training with less noise. Everything is computed on this machine.")
    client = st.session_state.setdefault("client", uuid.uuid4().hex)
    # An address that names a strategy is about one mechanism, whatever it says of the tab.
    asked = "experts" if "strategy" in st.query_params else _from_address("tab", "design")
    names = tuple(_TABS)
    index = names.index(asked) if asked in names else 0
    chosen = st.radio("What to show", names, index, format_func=_TABS.__getitem__, horizontal=True, key="tab",
                      label_visibility="collapsed")  # fmt: skip
    _experts(client) if chosen == "experts" else _designs(client)


if __name__ == "__main__":  # Streamlit runs the file under this name
    main()
