"""Options of a run: definitions, command line, config files, and value conversion."""

from .command_line import Parser, load_config
from .model_arguments import add_model_arguments, model_arguments
from .options import DATASETS, FIELDS, SYNONYMS, Config, ConfigError, check_choices
from .values import convert, parse_key_values

__all__ = [
    "DATASETS", "FIELDS", "SYNONYMS", "Config", "ConfigError", "Parser",
    "add_model_arguments", "check_choices", "convert", "load_config", "model_arguments", "parse_key_values",
]  # fmt: skip
