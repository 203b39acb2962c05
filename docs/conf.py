"""Sphinx's settings for the pages that docs/pages.py writes. The site asks nothing of another host."""

from silva import __version__

project = "Silva"
version = release = __version__
copyright = "the authors of Silva, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 6
default_role = "code"  # of docstrings, which are written as Markdown is
smartquotes = False
highlight_language = "none"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # words of a Literal that are also names of attributes
nitpick_ignore_regex = [("py:.*", ".*")]  # types of signatures; links between pages have other names

html_theme = "furo"
html_title = f"Silva {__version__}"
html_favicon = "favicon.svg"
html_static_path = ["narrow.css"]
html_css_files = ["narrow.css"]
html_extra_path = ["llms.txt"]
html_copy_source = True  # what llms.txt points at
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f7a4d", "color-brand-content": "#1f7a4d"},
    "dark_css_variables": {"color-brand-primary": "#5cc48d", "color-brand-content": "#5cc48d"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
