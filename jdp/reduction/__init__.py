"""What crosses ranks inside a step: gradients, metrics, and when they are sent."""
