"""Placement, weight sync, checkpointing, rollout scheduling and the training loop of Tandem."""
