"""What a gradient is made of: factors, or the rows of another's."""
