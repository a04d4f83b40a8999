"""Models as they were published: what a config.json means, what tensors are called, how tools have stored them.

Knows files and keys; must not import torch, open a weight, or know who holds what.
"""
