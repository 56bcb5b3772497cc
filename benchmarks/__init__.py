"""Speed and tightness: `make benchmark` writes docs/benchmarks.md, `python -m benchmarks` prints every table."""

import os

# Before numpy is there: seconds are to be those of one thread.
for _variable in (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "RAYON_NUM_THREADS",
):
    os.environ.setdefault(_variable, "1")
