"""The lines of a job: read, made, checked and found again."""
