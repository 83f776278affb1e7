"""Scale: a Llama-shaped language model of 7 billion parameters on the meta device is analysed.

python benchmarks/scale.py                    # 32 layers, 4096 wide: 6.7 billion parameters
python benchmarks/scale.py --layers 4         # quick
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "torch")]
MEBIBYTE = 1 << 20


def resident() -> int:
    """Resident memory of this process in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak() -> int:
    """Largest resident memory so far in bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--key-value-heads", type=int, default=32, help="less than 32: grouped queries")
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()

    import torch

    from nets.zoo import allow_torchvision

    allow_torchvision()  # transformers imports torchvision where it is installed
    import transformers

    from openwork.torch import analyze

    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.width * 43 // 16,
        num_hidden_layers=options.layers,
        num_attention_heads=32,
        num_key_value_heads=options.key_value_heads,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
        inputs = {"input_ids": torch.zeros(1, options.tokens, dtype=torch.int64)}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    before = resident()
    start = time.perf_counter()
    analysis = analyze(model, inputs)
    taken = time.perf_counter() - start
    units = sum(group.units for group in analysis.groups)
    print(f"parameters          {parameters / 1e9:.2f} billion")
    print(f"MACs                {analysis.macs / 1e9:.1f} billion for {options.tokens} tokens")
    print(f"groups              {len(analysis.groups)} with {units} units; {len(analysis.frozen)} frozen entries")
    print(f"analysed in         {taken:.2f} s")
    print(f"resident memory     {before / MEBIBYTE:.0f} MiB before, {peak() / MEBIBYTE:.0f} MiB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
