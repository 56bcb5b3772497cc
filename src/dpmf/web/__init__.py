"""The page behind ``dpmf explore``, and the file that ``dpmf report`` writes of one mechanism.

| module | holds |
|---|---|
| `request` | what a user can ask for, the limits, and the check of what was typed |
| `ranking` | designs ranked by error, found step by step: the first tab |
| `view` | what accountants say of one mechanism, computed step by step: the tab for experts, and the report |
| `pictures` | the drawings of a view, as SVG |
| `recipe` | the lines of Python and shell that give the same numbers |
| `document` | a view as one HTML file |
| `pool`, `worker` | processes that compute views; they can be cancelled, and are bounded in number, time and memory |
| `script.page`, `serve` | the Streamlit page, and its server on 127.0.0.1 |

Only `script.page` and `serve` import Streamlit.
"""
