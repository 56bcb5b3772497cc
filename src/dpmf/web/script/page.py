"""The page itself, a script that Streamlit runs once for every change of an input (see `serve`).

A run shows what is known and goes on until the view is finished. A change of an input ends the run and starts the next
one; the pool then ends the computation that nobody watches any more.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping
from typing import Any

import streamlit as st

from dpmf.batching import NAMES
from dpmf.formatting import lower
from dpmf.web import recipe
from dpmf.web.document import errors_in_words, html, noise, outcome
from dpmf.web.pool import Pool, Snapshot
from dpmf.web.request import BANDED, DIRECTIONS, LONGEST_TEXT, STRATEGIES, Request, parse
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
_LONGEST_ADDRESS = 2000
_STEP, _LONGEST_STEP = 0.25, 1.0  # seconds between two queries of the pool, at first and after a while


def _from_address(name: str, default: str) -> str:
    """Return the value of a field in the address of the page, so that a view can be linked to."""
    return str(st.query_params.get(name, default))


def _chosen(name: str, label: str, options: tuple[str, ...], default: str, **more: Any) -> str:
    asked = _from_address(name, default)
    index = options.index(asked if asked in options else default)
    return str(st.selectbox(label, options, index=index, key=name, **more))


def _fields() -> tuple[dict[str, str], dict[str, Any]]:
    """Return what was typed, and the place beside each field for a message about it."""
    typed: dict[str, str] = {}
    beside: dict[str, Any] = {}

    def text(name: str, label: str, value: str, help_text: str, area: bool = False) -> None:
        make, longest = (st.text_area, LONGEST_TEXT) if area else (st.text_input, 40)
        value = _from_address(name, value)[:longest]
        typed[name] = str(make(label, value, key=name, help=help_text, max_chars=longest))
        beside[name] = st.empty()

    with st.sidebar:
        typed["strategy"] = _chosen("strategy", "Strategy", STRATEGIES, "bsr", format_func=lambda name: _LABELS[name])
        beside["strategy"] = st.empty()
        if typed["strategy"] in BANDED:
            text("bandwidth", "Bandwidth p", "4", "of C (BSR, BandMF) or of its inverse (BISR, BandInvMF)")
        if typed["strategy"] == "blt":
            text("buffers", "Buffers", "", "leave empty to let the optimiser choose")
        if typed["strategy"] == "coefficients":
            text("coefficients", "First column of C", "1, 0.5, 0.375", "separated by commas or blanks", area=True)
        text("epochs", "Epochs k", "1", "the number of passes over the bins")
        text("batches_per_epoch", "Batches per epoch b", "100", "the number of bins")
        typed["batching"] = _chosen("batching", "Batching", NAMES, "fixed", format_func=lambda name: _BATCHINGS[name])
        beside["batching"] = st.empty()
        if typed["batching"] in ("reshuffled", "cyclic"):
            text("rethrow_every", "Epochs between throws", "", "leave empty to throw anew in every epoch")
        if typed["batching"] in ("reshuffled", "cyclic", "cyclic-poisson"):
            text("stride", "Stride", "", "distance between the iterations of one record; leave empty for the usual one")
        text("epsilon", "Target ε", "2", "of the guarantee")
        text("delta", "Target δ", "1e-5", "of the guarantee")
        with st.expander("More"):
            typed["direction"] = _chosen("direction", "Neighbouring relation", DIRECTIONS, "both")
            beside["direction"] = st.empty()
            text("max_order", "Largest Rényi order", "", "leave empty for as many as the work budget allows")
            text("noise_multiplier", "Noise multiplier of the curves", "", "leave empty for the smallest one found")
    return typed, beside


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
    used = [row.accountant for row in view.rows if row.noise_multiplier is not None]
    if finished and used:
        st.markdown("The same in Python")
        st.code(recipe.python(request, used, view.curve_noise), language="python")
        st.markdown("The same from the shell")
        st.code(recipe.shell(request, used), language="bash")
        st.download_button("This view as one HTML file", html(view, request, pictures), "dpmf-report.html", "text/html")


def _status(place: Any, snapshot: Snapshot) -> None:
    if snapshot.state == "waiting":
        ahead = f"{snapshot.ahead} before you" if snapshot.ahead else "starting"
        place.progress(0.0, f"waiting: {ahead}")
    elif snapshot.view is None:
        place.progress(0.0, f"starting ({snapshot.seconds:.0f} s)")
    else:
        view = snapshot.view
        place.progress(view.done / view.steps, f"{view.doing} ({snapshot.seconds:.0f} s; change an input to cancel)")


def _follow(pool: Pool, client: str, request: Request) -> None:
    """Show the view as it grows. Every round writes to the page, and there Streamlit can end this run."""
    status, body = st.empty(), st.empty()
    shown: View | None = None
    step = _STEP
    while True:
        snapshot = pool.watch(client, request)
        if snapshot.view is not None and (snapshot.view != shown or snapshot.finished):
            shown = snapshot.view
            with body.container():
                _show(shown, snapshot.pictures, request, snapshot.finished)
        if snapshot.finished:
            break
        _status(status, snapshot)
        time.sleep(step)
        step = min(1.1 * step, _LONGEST_STEP)
    if snapshot.state == "done":
        status.success(f"finished in {snapshot.seconds:.1f} s")
    else:
        status.warning(snapshot.message)


def main() -> None:
    """Show the page once."""
    st.set_page_config(page_title="dpmf explore", layout="wide")
    st.title("dpmf explore")
    st.caption(
        "Guaranteed noise multipliers for training with correlated noise. Everything is computed on this machine."
    )
    client = st.session_state.setdefault("client", uuid.uuid4().hex)
    typed, beside = _fields()
    request, problems = parse(typed)
    for name, words in problems.items():
        beside[name].error(_markdown_safe(words))
    if request is None:
        shared_pool().leave(client)
        st.info("Nothing is computed until the fields with a message beside them are corrected.")
        return
    if sum(map(len, typed.values())) < _LONGEST_ADDRESS:
        st.query_params.from_dict({name: text for name, text in typed.items() if text})
    st.subheader(request.mechanism().name)
    _follow(shared_pool(), client, request)


if __name__ == "__main__":  # Streamlit runs the file under this name
    main()
