"""From samples to gradients to new LoRA weights."""
