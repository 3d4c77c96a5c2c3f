"""What kernel, agent and rank share: the messages, the channel that carries them, the payload."""
