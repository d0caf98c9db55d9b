"""OpenAI's chat completions and completions, the base of the other APIs; and fields of vLLM's tokenize."""
