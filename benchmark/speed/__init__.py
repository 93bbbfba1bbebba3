"""Environment steps per second of scripts, of their peers, and of what bounds both.

peers has the programs, measure runs one of them, tables makes tables of the rows and chart a
figure, both of the report's blocks, and __main__ is the command line. The workers of peers run from
here: this file imports nothing, since that would count in their start-up.
"""
