"""Image and video scorers."""
