"""The FSDP2 trainer of language models: the model's own Hugging Face implementation under PyTorch FSDP2."""
