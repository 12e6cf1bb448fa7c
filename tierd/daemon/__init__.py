"""The daemon: the only place where deciding meets bytes."""
