"""The page at /ui, in a browser: the run's progress, its turns and versions.

`routes.py` has the addresses and who may see and do what, `read.py` what is shown, `charts.py` the
curves. `static/htmx-2.0.11.min.js` is the npm package htmx.org 2.0.11 (0BSD, its
licence beside it); a test checks its sha256.
"""
