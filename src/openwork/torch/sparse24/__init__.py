"""N:M masks on torch models: masked training, and telling whether a model or file keeps the pattern.

masked = apply_24(model, {"layer1.0.conv1": NofMSetting(update_freq=1)})
...                                     # train `masked` as any model
sparse = finalize(masked)               # exact zeros, plain layers
print(verify_sparsity(sparse))
"""

from __future__ import annotations

from openwork.torch.sparse24.apply import (
    apply_24,
    finalize,
    load_masks,
    maskable_layers,
    masked_layers,
    masks_of,
)
from openwork.torch.sparse24.oneshot import one_shot
from openwork.torch.sparse24.verify import LayerSparsity, SparsityReport, verify_sparsity

__all__ = [
    "LayerSparsity",
    "SparsityReport",
    "apply_24",
    "finalize",
    "load_masks",
    "maskable_layers",
    "masked_layers",
    "masks_of",
    "one_shot",
    "verify_sparsity",
]
