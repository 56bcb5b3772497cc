"""What a certificate says about the bound of a majorant: the model as blocks, the grids of its law, the inversion.

The format, and why all families are blocks of one kind, is in docs/certificates.md.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dpmf.accountants.chain._blocks import RenewalLaw, RenewalModel, SeparatorLaw, SeparatorModel
from dpmf.accountants.chain._inversion import Inversion
from dpmf.accountants.chain._lines import LineLaw, LineModel, StationaryLaw, StationaryModel
from dpmf.numerics import UNIT, Array

_MORE = 1.0  # deviations by which grids are longer than those of the law: the checker bounds what is beyond more simply
_UP = 1 + 8 * UNIT  # for what is computed from the model
_LONGEST = 5000  # indices of a line: the checker compares all pairs


def described(model: object, law: object, inversion: Inversion, noise_multiplier: float) -> dict[str, Any] | None:
    """The fields of a proof; None for a line that is too long to be checked.

    Args:
      model: the majorant, in units of G.
      law: its law, made for the model divided by σ².
      inversion: how the option was read off the law's transform.
      noise_multiplier: σ.
    """
    left: Array
    right: Array
    deviations: Array
    blocks, closed, left_out = 1, False, 0.0
    if isinstance(model, LineModel) and isinstance(law, LineLaw):
        left, right, deviations = np.zeros(model.size), model.loads, model.deviations
        correlations = np.append(0.0, law.walk.correlations)
        nuggets, separators, nodes, table = law.walk.nuggets, law.static.nodes, law.walk.nodes, law.walk.table
    elif isinstance(model, RenewalModel) and isinstance(law, RenewalLaw):
        left, right, deviations = np.zeros(model.length), model.right, model.deviations
        correlations = np.append(model.correlations[:1], law.walk.correlations)
        nuggets, separators, nodes, table = law.walk.nuggets, law.outer.nodes, law.walk.nodes, law.walk.table
        blocks, closed = model.blocks, model.closed
    elif isinstance(model, SeparatorModel) and isinstance(law, SeparatorLaw):
        left, right, deviations = model.left, model.right, model.inner
        correlations = np.append(0.0, np.ones(len(left) - 1))
        nuggets, separators, nodes, table = law.nuggets, law.outer.nodes, law.inner.nodes, law.table
        blocks, closed = model.blocks, model.closed
    elif isinstance(model, StationaryModel) and isinstance(law, StationaryLaw) and model.size <= _LONGEST:
        dropped = len(law.static.nodes) == 1
        left_out = model.shared if dropped else 0.0
        left, right = np.zeros(model.size), np.full(model.size, math.sqrt(model.shared - left_out) * _UP)
        deviations = np.full(model.size, math.sqrt(model.smooth) * _UP)
        correlations = np.append(0.0, np.full(model.size - 1, model.correlation))
        nuggets = np.full(model.size, model.nugget / noise_multiplier**2)
        separators, nodes, table = law.static.nodes, law.nodes, law.table
    else:
        return None
    return {
        "model": {
            "left": left.tolist(),
            "right": right.tolist(),
            "deviations": deviations.tolist(),
            "correlations": correlations.tolist(),
            "nuggets": (nuggets * noise_multiplier**2 * _UP).tolist(),
            "blocks": int(blocks),
            "closed": bool(closed),
            "left_out": float(left_out),
        },
        "separators": _grid(separators, law.option.sign),
        "nodes": _grid(nodes, law.option.sign),
        "terms": _grid(table.rows, 0),
        "inversion": {
            "option": "call" if inversion.sign > 0 else "put",
            "tilt": inversion.tilt,
            "period": inversion.period,
            "smoothing": inversion.smoothing,
            "frequencies": inversion.frequencies,
        },
    }


def _grid(nodes: Array, sign: int) -> dict[str, Any]:
    """Equidistant nodes, and some more at the end where what is beyond them counts."""
    if len(nodes) == 1:
        return {"low": float(nodes[0]), "spacing": 1.0, "count": 1}
    low, spacing = float(nodes[0]), float(nodes[1] - nodes[0])
    more = math.ceil(_MORE / spacing) if sign else 0
    return {"low": low - (more * spacing if sign < 0 else 0.0), "spacing": spacing, "count": len(nodes) + more}
