"""Pure maths of the spot market."""
