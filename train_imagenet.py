"""Train an image classifier. The program is vil/cli/train.py, and `--help` prints its documentation.

Without a config file, only the splits are chosen by the folder, unlike in `vil train`. Other options have defaults.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    # Handle signals before the slow import of `vil`. `import vil.fault_tolerance` would import `vil` first.
    handlers = runpy.run_path(str(Path(__file__).parent / "vil/fault_tolerance/early_signals.py"))
    handlers["exit_on_signals"]()

from vil.cli.train import main
from vil.fault_tolerance.streams import outlive_output

if __name__ == "__main__":
    outlive_output()
    main(chooses_recipe=False)
