"""What any other folder may use: files, tables of text, bounds of rounding."""
