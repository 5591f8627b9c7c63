"""How plans are made: a scheme for each gradient, and what travels together."""
