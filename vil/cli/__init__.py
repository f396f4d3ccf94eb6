"""The `vil` command and its subcommands.

`main` selects the subcommand. Each other module of this package defines the options of one subcommand and imports only
light modules, so that help and errors appear at once. The code that does the work of a subcommand is in another
package, often in a module `command`, and is imported after the options are parsed.
"""
