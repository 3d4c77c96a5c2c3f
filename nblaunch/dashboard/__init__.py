"""What a person watches: the state of a run, built from its messages, and the views of it."""
