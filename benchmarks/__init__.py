"""Speed and tightness, beside the peers: `python -m benchmarks` (or `make benchmark`) prints every table."""
