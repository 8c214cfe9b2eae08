"""YAML -> Task."""
