"""Training draft heads from the target's own texts: generate, tap, train, write what others load."""
