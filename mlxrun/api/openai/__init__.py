"""OpenAI's chat completions, completions and embeddings, and reranking. Other APIs translate to these."""
