"""The standard tasks that come with mlxrun: a YAML file each, their scorers, and what prepares their rows."""
