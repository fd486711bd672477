"""A red team that stays: drawn combinations of an everyday call, a fault, a moment and settings, in real processes.

    make redteam SECONDS=600 SEED=7          # one line a case
    make redteam SEED=7 CASE=12              # that one again; what fails is made as plain as it can be while it fails

A case is drawn from its seed and number alone, and stays the same as long as the lists of calls and states do. `case` draws
and shrinks, `script` is what a rank runs, `judge` starts the lives of a case and says what is wrong. The calls and the kinds
of state are those of `zoo_calls` and `zoo_states`.
"""
