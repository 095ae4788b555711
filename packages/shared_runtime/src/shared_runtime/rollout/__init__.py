"""Rollouts: groups of samples generated, scored and filtered until a batch is full."""
