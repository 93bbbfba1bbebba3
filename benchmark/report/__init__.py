"""The report of runs: curves, tables and statistics.

runs reads folders and CSVs into two frames. stats computes with them, tables and figures show what
is found, contents puts both into sections, page writes these as HTML and Markdown. __main__ is the
command line; results redraws what this repository has committed, with the tables of algorithms and
diffs.
"""
