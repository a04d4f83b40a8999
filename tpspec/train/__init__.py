"""Training draft heads and draft models from the target's own texts: generate, tap, train, write what others load."""
