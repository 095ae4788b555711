"""RL post-training of language models."""
