"""Settings as frozen dataclasses, the JSON Schema made from them, and the loader of YAML files."""
