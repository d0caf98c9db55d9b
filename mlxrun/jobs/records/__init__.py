"""The files that a job writes."""
