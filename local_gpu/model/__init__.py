"""The base model: loaded, checked, trained as LoRA, kept on disk and exported."""
