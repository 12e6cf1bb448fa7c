"""Policies: pure decisions over opaque keys and plain numbers. They know no block and no byte."""
