"""Training: from samples to gradients to new LoRA weights."""
