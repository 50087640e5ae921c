"""How clef-nano was made: readers of public data, a generator of records, drawn pictures, and the training itself."""
