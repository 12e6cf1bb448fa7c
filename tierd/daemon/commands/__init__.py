"""The commands of `tierd`, one a file: what each is told, and what it does."""
