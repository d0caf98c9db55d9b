"""Two runs of the same lines: paired, compared, and put into a table."""
