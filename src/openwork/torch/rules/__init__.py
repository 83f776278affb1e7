"""Rules that map torch operators to the structural vocabulary; importing the package registers them."""

from openwork.torch.rules import contractions, mixing, shapes
from openwork.torch.rules._registry import Context, Cost, Rule, find_rule

__all__ = ["Context", "Cost", "Rule", "contractions", "find_rule", "mixing", "shapes"]
