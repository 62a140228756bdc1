"""The engine's scheduler and block cache on a virtual clock: what a policy does to a trace, without a model. Touches no tensor."""
