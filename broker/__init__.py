"""broker finishes a training job on the cheapest machines of any cloud."""

__version__ = "0.1.0"
