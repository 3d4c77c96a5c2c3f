"""One per device: from the fork to the end of the process that runs the training function."""
