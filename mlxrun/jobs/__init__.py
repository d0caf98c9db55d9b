"""The batch runner: answers the lines of a JSONL job; a killed job continues where it was."""
