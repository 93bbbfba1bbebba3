"""Sweeps, reports and speed. Data flows one way, and each fact is written once.

A suite's TOML (suite) becomes runs. A sweep (sweep) has a backend (backends) execute a task (task)
for each, which starts or resumes the run's script until the run's folder says that it is finished.
search does a sweep for each trial of Optuna's. hub sends a run's folder to the Hugging Face Hub.
report reads such folders, or the CSVs of an earlier report, as frames, and makes curves, tables and
statistics of them. speed measures on its own. In report, only algorithms and results, which redraw
the committed pages, know speed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the folder with the scripts and benchmark/


def fail(message):
    """Ends the program for bad input."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
