"""Text graders: strings in, a float or a dict out."""
