"""The report of runs: curves, tables and statistics.

Data goes one way: benchmark.runs reads folders into frames; analysis computes with them; contents
puts what was found into words, tables and figures (blocks); figures draws the figures; page writes
HTML and Markdown; __main__ is the command line. results redraws what this repository has committed.
"""
