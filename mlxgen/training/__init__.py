"""The training loop, and what it is fed with."""
