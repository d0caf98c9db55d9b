"""A job on several engines: lines go to workers in other processes, and their answers come back."""
