"""The page behind ``dpmf explore`` and the file that ``dpmf report`` writes: one view, shown in two ways.

| module | holds |
|---|---|
| `request` | what a user can ask for, the limits, and the check of what was typed |
| `view` | what is shown, computed step by step |
| `pictures` | the drawings of a view, as SVG |
| `recipe` | the lines of Python and shell that give the same numbers |
| `document` | a view as one HTML file |
| `pool`, `worker` | processes that compute views; they can be cancelled, and are bounded in number, time and memory |
| `script.page`, `serve` | the Streamlit page, and its server on 127.0.0.1 |

Only `script.page` and `serve` import Streamlit.
"""
