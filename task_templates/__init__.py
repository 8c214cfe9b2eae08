"""Ready tasks: each can be launched with `broker launch task_templates/NAME.yaml`."""
