"""What must not be kept: secrets, personal data, and what was said in private. Pure."""
