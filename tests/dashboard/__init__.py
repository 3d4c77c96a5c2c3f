"""The dashboard, tested from its messages."""
