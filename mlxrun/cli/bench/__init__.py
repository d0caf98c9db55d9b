"""`mlxrun bench`: the engine and its peers over the same model and the same work, measured the same way."""
