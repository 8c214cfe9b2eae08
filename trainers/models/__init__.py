"""The networks that the trainers train."""
