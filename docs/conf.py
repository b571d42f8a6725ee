"""How the pages become a site: `make docs`, which needs no network.

Rule: the pages ask nobody for anything. Formulas are MathML, which docutils writes and browsers
draw, so that no script and no font comes from elsewhere.
"""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "tinker-claw"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True
highlight_language = "none"  # most blocks are commands and what they print

myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = False  # "$0.18, and $0.04" are prices
myst_dmath_allow_digits = False
myst_heading_anchors = 3
myst_linkify_fuzzy_links = False

html_theme = "furo"
html_title = "tinker-claw"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_use_index = False
html_domain_indices = False


def inline_formula(page: HTML5Translator, node: nodes.math) -> None:
    page.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def formula(page: HTML5Translator, node: nodes.math_block) -> None:
    page.body.append(f"<div class='math'>{tex2mathml(node.astext(), as_block=True)}</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
