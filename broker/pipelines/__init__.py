"""Place the tasks of a pipeline together."""
