"""Suites: models x tasks x seeds, written as one YAML file and run as ordinary jobs."""
