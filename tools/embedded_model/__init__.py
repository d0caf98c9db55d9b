"""How the embedded model was made: data, tokenizer, training, export, scores, job files."""
