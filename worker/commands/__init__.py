"""One file per command of `python -m worker`, and what they share: the terminal, and the workers they need."""
