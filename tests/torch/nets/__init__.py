"""Networks that the tests and the benchmarks run on: micro-nets, random nets, and the zoo."""
