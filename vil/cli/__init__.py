"""The `vil` command and its subcommands.

`main` selects the subcommand. Each other module of this package holds the options of one subcommand and imports only
light modules, so that help and errors appear at once. The work is in another package, often in its module `command`,
and is imported after parsing.
"""
