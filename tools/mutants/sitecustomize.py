"""Imported by every Python process that a mutant's test starts: the mutant is there too, and what it reaches counts."""

import os

if os.environ.get("MUTANT_UNDER_TEST"):
    import reached

    reached.in_this_process()
