"""Detection of data that must not be kept: secrets, personal data, and private chats. Pure."""
