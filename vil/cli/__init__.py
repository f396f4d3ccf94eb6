"""The `vil` command and its subcommands.

A module of this package holds the options of one subcommand and imports only light modules, so that help and errors
appear at once. The work is in the module `command` of another package, which is imported after parsing.
"""
