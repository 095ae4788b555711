"""Training a diffusers transformer under FSDP2."""
