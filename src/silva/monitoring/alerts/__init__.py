"""What goes wrong in a run, in words, with what to try. Pure functions of its numbers.

    signs.py   rows of training steps: collapse, failures, a plan that is off
    fall.py    evaluations: held-out results clearly below their best
    gap.py     both: training tasks known by heart

All are told as warnings, so that terminal, run.log, report and sinks have them. A stall is watchdog.py's.
"""
