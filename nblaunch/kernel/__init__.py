"""In the notebook kernel: starts agents, asks for launches, and holds what comes home."""
