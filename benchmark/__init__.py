"""Sweeps, reports and speed. Data flows one way, and each fact is written once.

A suite's TOML (suite) becomes runs, which stand in a sweep's folder (store). Workers (worker),
which an engine starts (engines) when the sweep says so (sweep), run the scripts there. status shows
the folder, runs reads it as frames, variants names what differs, stats and report make curves and
tables of them. speed measures on its own, without sweeps or run folders, and shows what it found
with the report's tables and figures. In report, only algorithms and results, which redraw the
committed pages, know speed.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the folder with the scripts and benchmark/
