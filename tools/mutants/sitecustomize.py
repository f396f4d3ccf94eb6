"""Plant the mutant in every Python process that a mutant's test starts, and record the functions that each process
calls.
"""

import os

if os.environ.get("MUTANT_UNDER_TEST"):
    import reached

    reached.in_this_process()
