"""Models as one GGUF file: header, config, tokenizer and weights, in the form that mlx-lm takes."""
