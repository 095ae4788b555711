"""Dtypes of training and determinism."""
