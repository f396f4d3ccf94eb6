"""Options of a run: definitions, command line and files, and the options that a checkpoint may set."""

from .command_line import Parser, load_config
from .options import DATASETS, FIELDS, SYNONYMS, Config, ConfigError, check_choices
from .trust import MODEL_KWARGS, NOT_FROM_CHECKPOINTS, confirm_dataset, options_of_checkpoint
from .values import convert, parse_key_values

__all__ = [
    "DATASETS", "FIELDS", "MODEL_KWARGS", "NOT_FROM_CHECKPOINTS", "SYNONYMS", "Config", "ConfigError", "Parser",
    "check_choices", "confirm_dataset", "convert", "load_config", "options_of_checkpoint", "parse_key_values",
]  # fmt: skip
