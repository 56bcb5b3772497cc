"""The evidence: every measured number of the documentation, the code that made it, and the pages made from it.

    pages, figures and claims → cells → engine (joblib or Dask) → store → docs/data → pages and pictures

| module | holds |
|---|---|
| `spec` | the vocabulary: mechanisms, accountants, cells, lines, panels, figures |
| `quantities` | what a cell computes, on dpmf's public API |
| `source`, `fingerprint` | which code a number depends on |
| `store` | results by cell and code, written as they come, and committed as JSON |
| `engine`, `backends` | runs what is missing: this machine's cores, or a Dask cluster |
| `pages` | which cells each page consists of, how it is written, whether it is stale |
| `say`, `pictures` | tables, numbers in words, pixels |
| `results` | docs/results.md: the paper's figures, what they show, the paper's claims judged |
| `tightness`, `accountants`, `concepts` | the pages of these names |
| `cli` | the command line, ``python -m evidence`` |

It is run from a checkout and is in no wheel. The benchmarks and the soundness campaign measure by themselves, with
the same fingerprints.
"""
