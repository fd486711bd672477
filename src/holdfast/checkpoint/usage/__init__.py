"""Tells whether the lines of a plain loop are right: what is in no version is named at the first steps, with the
remedy.

`names.py` and `loops.py` read the text of the loop (pure); `observer.py` looks at the values of its first steps and tells, once.
"""
