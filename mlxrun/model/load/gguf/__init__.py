"""Models as one GGUF file: header, config, tokenizer and weights, converted for mlx-lm."""
