"""Of benchmarks, what can be tested: that they run, keep what they have, and say what they lack."""
