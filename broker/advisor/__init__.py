"""Recommend how to train a model: instances, layout, time and cost."""
