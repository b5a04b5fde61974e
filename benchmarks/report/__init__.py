"""The output of a run: tables, plots and one HTML page (``page.css`` is its style, ``page.js`` its script).

======  =======================================================================================
tables  tables on the terminal: cases, the sweep over density, two runs compared
plots   plots as PNG files and as SVG text, with matplotlib
page    the page
======  =======================================================================================

Imports ``measure`` and, for the page's table of compiled code, ``static``. It reads the record of a run and
times nothing.
"""
