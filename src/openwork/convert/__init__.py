"""The converter behind ``openwork convert``: find 2:4 weights in a model, store them compressed, run it anywhere."""
