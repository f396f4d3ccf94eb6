"""Validate an image classifier. The program is vil/cli/validate.py, and `--help` prints its documentation."""

from vil.cli.validate import main
from vil.fault_tolerance.streams import outlive_output

if __name__ == "__main__":
    outlive_output("stderr")
    main()
