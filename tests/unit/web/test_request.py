"""What was typed into the page becomes a request, or words beside its field."""

from __future__ import annotations

import json

import pytest

from dpmf.web import request as limits
from dpmf.web.request import Request, parse

GOOD = {
    "strategy": "bsr",
    "bandwidth": "4",
    "epochs": "2",
    "batches_per_epoch": "30",
    "epsilon": "2",
    "delta": "1e-5",
}


def test_what_was_typed_becomes_a_request() -> None:
    request, problems = parse({**GOOD, "epsilon": " 2.5 ", "max_order": "", "noise_multiplier": "3"})
    assert problems == {}
    assert request == Request("bsr", 2, 30, 2.5, 1e-5, bandwidth=4, noise_multiplier=3.0)
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request
    assert request.mechanism().name == "BSR(p=4), k=2, b=30"


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("strategy", "nonsense", "one of dpsgd"),
        ("strategy", "../../etc/passwd", "one of dpsgd"),
        ("bandwidth", "0", "from 1 to 1024"),
        ("bandwidth", "4.5", "whole number"),
        ("bandwidth", "", "got nothing"),
        ("epochs", "1e9", "whole number"),
        ("epochs", "1000000000", "from 1 to 1000"),
        ("epochs", "9" * 5000, "whole number"),
        ("epochs", "-3", "from 1 to 1000"),
        ("epochs", "1_0", "whole number"),
        ("batches_per_epoch", "2001", "from 1 to 2000"),
        ("batches_per_epoch", "٣", "from 1 to 2000"),
        ("epsilon", "0", "from 0.01 to 50"),
        ("epsilon", "nan", "from 0.01 to 50"),
        ("epsilon", "inf", "from 0.01 to 50"),
        ("epsilon", "two", "a number such as"),
        ("epsilon", "1_0", "a number such as"),
        ("delta", "1", "from 1e-15 to 0.5"),
        ("delta", "1e-400", "from 1e-15 to 0.5"),
        ("direction", "sideways", "one of both"),
        ("max_order", "1", "from 2 to 512"),
        ("max_order", "100000", "from 2 to 512"),
        ("noise_multiplier", "0", "from 0.001 to 1e+06"),
    ],
)
def test_whatever_is_wrong_is_said_at_its_field(field: str, text: str, words: str) -> None:
    if text == "٣":  # a digit, but not one of ours: read as three or refused, never a crash
        request, _ = parse({**GOOD, field: text})
        assert request is None or request.batches_per_epoch == 3
        return
    request, problems = parse({**GOOD, field: text})
    assert request is None
    assert list(problems) == [field]
    assert words in problems[field]
    assert problems[field].startswith(field)
    assert "\n" not in problems[field]
    assert len(problems[field]) < 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got nothing"),
        ("1, x", "'x'"),
        ("1, -1", "from 0 to 1e6"),
        ("1, nan", "from 0 to 1e6"),
        ("0, 1", "start with a positive"),
        ("1 " * 2001, "at most 2000 numbers"),
        ("1" * 50_001, "at most 50000 characters"),
        ("/etc/passwd", "'/etc/passwd'"),
    ],
)
def test_coefficients_are_numbers_and_never_a_file(text: str, words: str) -> None:
    request, problems = parse({**GOOD, "strategy": "coefficients", "coefficients": text})
    assert request is None
    assert words in problems["coefficients"]


def test_the_product_of_epochs_and_batches_is_bounded() -> None:
    request, problems = parse({**GOOD, "epochs": "1000", "batches_per_epoch": "2000"})
    assert request is None
    assert f"at most {limits.MOST_ITERATIONS}" in problems["epochs"]


@pytest.mark.parametrize(
    ("batching", "name"),
    [
        ({"batching": "reshuffled"}, "k=2, b=30, reshuffled, gap 3"),
        ({"batching": "reshuffled", "rethrow_every": "2"}, "k=2, b=30"),
        ({"batching": "cyclic"}, "k=2, b=30, reshuffled, stride 5"),
        ({"batching": "cyclic-poisson", "stride": "6"}, "k=2, b=30, cyclic Poisson of period 6"),
    ],
)
def test_a_batching_can_be_chosen(batching: dict[str, str], name: str) -> None:
    request, problems = parse({**GOOD, **batching})
    assert problems == {}
    assert request.mechanism().name == f"BSR(p=4), {name}"


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ({"batching": "shuffled"}, "batching"),
        ({"batching": "poisson"}, "batching"),
        ({"batching": "reshuffled", "stride": "7"}, "stride"),
        ({"batching": "reshuffled", "rethrow_every": "3"}, "rethrow_every"),
    ],
)
def test_a_batching_that_does_not_fit_is_said_at_its_field(typed: dict[str, str], field: str) -> None:
    request, problems = parse({**GOOD, **typed})
    assert request is None
    assert list(problems) == [field]
