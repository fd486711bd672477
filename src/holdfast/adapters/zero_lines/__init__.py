"""Zero lines: `holdfast run --checkpoint-dir ROOT train.py` keeps a script alive that knows nothing of holdfast.

What is recognised, and what happens: a `transformers.Trainer` is kept (`adapters.huggingface`), a Lightning Trainer gets the
callback (`adapters.lightning`), both when they are built; a plain loop, `for step in range(...)` around backward and one
optimizer's step, is found in the script (`script.py`), and when it begins to run, what it uses is looked at (`objects.py`).
Only if all of that is known to be restorable the loop goes on where it was (`loop.py`); otherwise it is said why not, once,
and the script runs as if holdfast were not there. A script that imports holdfast is left alone. Loops inside each other and over
loaders (`nested/nested_script.py`, `nested/nested_loop.py`) go on in the same way: at the item that each of them had (`nested/nested_items.py`).
"""
