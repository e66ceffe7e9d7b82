"""Passes: ordered changes of a decoder that has its weights."""
