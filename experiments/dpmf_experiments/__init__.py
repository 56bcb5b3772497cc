"""Every figure of the paper as a declarative spec, one engine that computes them, and a store that forgets nothing.

    figures (specs) → cells → engine (joblib or Dask) → store (SQLite) → pictures, docs/results.md

| module | holds |
|---|---|
| `spec` | the vocabulary: mechanisms, accountants, cells, lines, panels, figures |
| `settings` | mechanisms, accountants and grids |
| `figures` | the figures, as values |
| `quantities` | what a cell computes, on dpmf's public API |
| `fingerprint` | which code a cell's number depends on |
| `store` | results by cell and code, written as they come |
| `engine`, `backends` | runs what is missing: this machine's cores, or a Dask cluster |
| `draw`, `findings`, `claims`, `page` | pictures, what they show, the paper's claims judged, docs/results.md |
| `cli` | the command line, `dpmf-experiments` |
"""
