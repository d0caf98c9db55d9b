"""From a model's files to a model in memory."""
