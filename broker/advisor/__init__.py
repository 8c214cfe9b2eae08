"""Recommend how to train or serve a model: instances, layout, time and cost."""
