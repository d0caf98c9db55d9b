"""Batches of the server: their files on disk, and the queue that runs them on spare capacity."""
