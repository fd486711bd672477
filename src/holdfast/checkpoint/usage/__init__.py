"""Tells whether the lines of a plain loop are right: what is in no version is named at the first steps, with the
remedy.

`name_flow.py`, `in_place.py` and `loop_analysis.py` read the text of the loop (pure); `loop_observer.py` looks at the values of its first
steps and tells, once.
"""
