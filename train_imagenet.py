"""Train an image classifier. The program is vil/cli/train.py, and `--help` prints its documentation.

Unlike `vil train`, this program chooses only the splits by the content of the folder if no config file is given. Other
options have default values.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    # Handle signals before the slow import of `vil`. The file runs by path, because `import vil.fault_tolerance` would
    # import `vil` first.
    handlers = runpy.run_path(str(Path(__file__).parent / "vil/fault_tolerance/early_signals.py"))
    handlers["exit_on_signals"]()

from vil.cli.train import main
from vil.fault_tolerance.streams import outlive_output

if __name__ == "__main__":
    outlive_output()
    main(chooses_recipe=False)
