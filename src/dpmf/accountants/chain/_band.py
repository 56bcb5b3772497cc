"""Steps of a chain as banded matrices: a chain that forgets slowly goes to few of its nodes in one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmf.numerics import Array

_ROWS = 24  # of one piece
_SINGLE_THREADED = 2**18  # multiplications of a matrix product up to which a BLAS starts no threads for it


@dataclass(frozen=True, eq=False)
class Band:
    """A transition matrix without its negligible entries, in pieces of a few rows each.

    **Formal guarantees.** Entries are kept or left out, never changed: the measure that the steps make is part of the
    one that the whole matrix makes. `left_out` is at least the sum of the entries left out of any row.
    """

    pieces: tuple[tuple[slice, slice, Array], ...]
    left_out: float
    summands: int  # of the longest row kept

    @classmethod
    def of(cls, matrix: Array, negligible: float) -> Band:
        """Without entries at the ends of rows that are at most `negligible`."""
        n = len(matrix)
        pieces, left_out, summands = [], 0.0, 0
        for begin in range(0, n, _ROWS):
            rows = slice(begin, min(begin + _ROWS, n))
            kept = np.flatnonzero((matrix[rows] > negligible).any(axis=0))
            columns = slice(int(kept[0]), int(kept[-1]) + 1)
            outside = matrix[rows, : columns.start].sum(axis=1) + matrix[rows, columns.stop :].sum(axis=1)
            left_out = max(left_out, float(outside.max()) * (1 + 1e-9))
            summands = max(summands, columns.stop - columns.start)
            pieces.append((rows, columns, np.ascontiguousarray(matrix[rows, columns])))
        return cls(tuple(pieces), left_out, summands)

    def apply(self, values: Array) -> Array:
        """The product with each of several arrays, node × anything."""
        found = np.empty((len(values), self.pieces[-1][0].stop, values.shape[2]))
        for rows, columns, piece in self.pieces:
            np.matmul(piece, values[:, columns], out=found[:, rows])
        return found

    def widest(self) -> int:
        """Columns that values may have without a BLAS starting threads for one product."""
        return max(2, _SINGLE_THREADED // max(piece.size for _, _, piece in self.pieces))
