"""The options of a run, the command line and files that give them, and those that a checkpoint may decide."""

from .command_line import Parser, load_config
from .options import DATASETS, FIELDS, SYNONYMS, Config, ConfigError
from .trust import MODEL_KWARGS, NOT_FROM_CHECKPOINTS, confirm_dataset, options_of_checkpoint
from .values import parse_key_values

__all__ = [
    "DATASETS", "FIELDS", "MODEL_KWARGS", "NOT_FROM_CHECKPOINTS", "SYNONYMS", "Config", "ConfigError", "Parser",
    "confirm_dataset", "load_config", "options_of_checkpoint", "parse_key_values",
]  # fmt: skip
