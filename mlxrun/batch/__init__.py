"""The offline front end: a JSONL job in, answers out; a killed job goes on where it was."""
