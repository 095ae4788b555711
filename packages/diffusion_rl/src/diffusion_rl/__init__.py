"""RL post-training of diffusion models."""
