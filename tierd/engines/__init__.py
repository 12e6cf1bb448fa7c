"""Adapters: real engines that run on tierd's blocks in place."""
