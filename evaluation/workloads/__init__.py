"""Models, accelerators, and computing that is emulated."""
