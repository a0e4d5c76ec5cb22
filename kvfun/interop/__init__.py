"""Thin stateful shells around kvfun's values, one folder a foreign library."""
