"""Operators that are put into a graph in place: channel masks, N:M selection, fake quantisation."""
