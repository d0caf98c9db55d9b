"""The run of a job, from its start to its exit code."""
