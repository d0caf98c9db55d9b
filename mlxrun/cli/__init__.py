"""The command line: one module a command, imported only when it runs."""

INTERRUPTED_EXIT = 130
