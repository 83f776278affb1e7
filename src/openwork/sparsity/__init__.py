"""N:M sparsity on arrays: masks, permutation, one-shot methods, 2:4 packing. No framework is imported."""

from openwork.sparsity.masks import PatternCheck, apply_mask_, check, nm_mask
from openwork.sparsity.oneshot import magnitude, sparse_gpt, wanda
from openwork.sparsity.pack24 import Not24Error, Packed24, Pattern24, check24, pack24, unpack24
from openwork.sparsity.permutation import PermutationResult, kept_magnitude, search_permutation

__all__ = [
    "Not24Error",
    "Packed24",
    "Pattern24",
    "PatternCheck",
    "PermutationResult",
    "apply_mask_",
    "check",
    "check24",
    "kept_magnitude",
    "magnitude",
    "nm_mask",
    "pack24",
    "search_permutation",
    "sparse_gpt",
    "unpack24",
    "wanda",
]
