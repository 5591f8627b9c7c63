"""GraphDefs: how passes read and write them."""
