"""One module a command, imported only when it runs."""
