"""N:M sparsity on arrays: masks, permutation, one-shot methods, 2:4 packing. No framework is imported."""

from openwork.sparsity.pack24 import Not24Error, Packed24, Pattern24, check24, pack24, unpack24

__all__ = ["Not24Error", "Packed24", "Pattern24", "check24", "pack24", "unpack24"]
