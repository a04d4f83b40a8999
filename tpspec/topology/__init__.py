"""YAML -> a checked, frozen description -> who is what, and who holds which slice.

Knows numbers and names; must not import torch, start anything or read a weight.
"""
