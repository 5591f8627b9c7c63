"""When variables are updated in a step: not before what others must have read of them."""
