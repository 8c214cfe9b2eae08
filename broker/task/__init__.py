"""Read task files: YAML -> Task, with the position of every error."""
