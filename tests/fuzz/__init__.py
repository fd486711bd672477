"""Fuzzers of all that reads foreign bytes: `make fuzz`, and a short run in tests/testing/test_fuzz.py.

An input is a kept sample that was changed a few times: as a tree of values where the form is known (JSON, msgpack,
protocol buffers, headers), with lengths and checksums made right again, or as bare bytes. What a parser says decides
what is kept as a further sample: each kind of answer once. Everything follows from the seed.

A parser may answer with a value or with the errors that it documents. It may not raise anything else, use more than
LIMIT_S of processor time, need more than LIMIT_BYTES of memory, end the process, or accept what it cannot write again.
Each runs in a child (`fuzz.child`) under limits of the kernel; `fuzz.__main__` watches from outside.

Hypothesis is not used for this: it knows no limit of memory or time that a child could be ended for, and its engine is
many times slower than these parsers. Atheris would steer by coverage, but needs its own build of clang.
"""
