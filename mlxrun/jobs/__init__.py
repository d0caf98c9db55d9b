"""The batch runner: answers the lines of a JSONL job. A killed job continues where it stopped."""
