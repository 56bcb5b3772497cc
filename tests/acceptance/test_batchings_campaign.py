"""A slice of the campaign on batchings: random small mechanisms, whole runs as the truth."""

from __future__ import annotations

import pytest

from soundness.batchings import check


@pytest.mark.parametrize("block", range(2))
def test_no_bound_is_on_the_wrong_side(block):
    for index in range(10 * block, 10 * block + 10):
        drawn, findings = check(1, index)
        wrong = [finding for finding in findings if not finding.sound]
        assert not wrong, (drawn, wrong)
