"""Run folders read back: the runs that a path names, their records, and what was edited or is missing."""
