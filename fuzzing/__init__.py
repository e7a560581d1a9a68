"""Fuzzers: one for each parser of input that Muster did not write itself, and one for each server.

    python -m fuzzing --seconds 600                     # all targets, with atheris; `make fuzz` installs it
    python -m fuzzing --target job_spec --seconds 60
    python -m fuzzing --target job_spec --input FILE    # one input again, with the traceback
    python -m fuzzing --near-corpus 200                 # without atheris: the kept corpus, and inputs near it

A target is a function of bytes that states what must hold for every input (`target.py`). `corpus` has the inputs that
are kept: real ones, and one for each defect that was found. `planted_bugs.py` has a bug for each target, which the
target must find.
"""
