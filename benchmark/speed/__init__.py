"""Environment steps per second of the scripts and of their peers.

peers says what is measured, sb3 and cleanrl are the peers' loops, measure runs one program, tables
and chart show the rows, and __main__ is the command line. workers measures what several processes
make of ppo_continuous_action_ray.py.
"""
