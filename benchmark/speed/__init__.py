"""Environment steps per second of scripts, of their peers, and of what bounds both.

peers has the programs, measure runs one of them, tables makes Markdown and a chart of the rows, and
__main__ is the command line. The workers of peers run from here: this file imports nothing, which
would count in their start-up.
"""
