"""The page behind ``dpmf explore`` and the file that ``dpmf report`` writes: one view, shown twice.

| module | holds |
|---|---|
| `request` | what can be asked for, its limits, the check of what was typed |
| `view` | what is shown, computed step by step |
| `pictures` | its drawings, as SVG |
| `recipe` | the lines of Python and shell that give the same |
| `document` | the view as one file |
| `pool`, `worker` | processes that compute views, can be cancelled, and are bounded in number, time and memory |
| `script.page`, `serve` | the Streamlit page, and its server on 127.0.0.1 |

Only `script.page` and `serve` import Streamlit.
"""
