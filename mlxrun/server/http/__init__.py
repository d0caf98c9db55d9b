"""HTTP for every API: access, bodies, errors, lists, streams and routes."""
