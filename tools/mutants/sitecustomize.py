"""Python imports this module at startup, so that every process started by a test uses the mutant under test."""

import os

if os.environ.get("MUTANT_UNDER_TEST"):
    import reached

    reached.in_this_process()
