"""Evaluate a model on a validation split, or compare two models. The program is vil/cli/validate.py.

python validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet
python validate.py --help
"""

from vil.cli.validate import main
from vil.fault_tolerance.streams import outlive_output

if __name__ == "__main__":
    outlive_output("stderr")
    main()
