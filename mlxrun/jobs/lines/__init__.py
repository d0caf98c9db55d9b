"""The lines of a job: made, read, indexed and checked."""
