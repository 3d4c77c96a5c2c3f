"""One per machine: forks the ranks, watches them, writes the run's folder, forwards what they say."""
