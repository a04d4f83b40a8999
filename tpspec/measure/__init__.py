"""What speculation saves: the same prompts plain and speculative, counted and timed in one run.

Stands beside serve and generate, above everything else; nothing imports it.
"""
