"""Recognises how gradients are computed: as products of factors, or from the rows of another gradient's factor."""
